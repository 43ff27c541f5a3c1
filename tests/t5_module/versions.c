// SPDX-License-Identifier: GPL-2.0
/* A provider and a program as built with the header of 0.1: its promises hold with the module of today. */

#include "../versions/v0_1/ggroup.h"
#include "program.h"

#define MIB	(1ULL << 20)

static int provider;
static u64 root, process;
static u32 ops;			/* bits of the commands received */

#define MUST(what)	do { int err = (what); if (err) { errno = -err; die("%s", #what); } } while (0)
#define HOLDS(what)	do { if (!(what)) die("not so: %s", #what); } while (0)

static void *provide(void *unused)
{
	struct ggroup_message message;

	(void)unused;
	while (read(provider, &message, sizeof(message)) == sizeof(message)) {
		ops |= 1U << message.op;
		if (message.op == GGROUP_OP_ARRIVE) {
			struct ggroup_group group = {
				.root = root, .parent = root, .kind = GGROUP_KIND_PROCESS,
				.pid = (s32)message.args[1], .start = message.args[2],
			};

			MUST(call(provider, GGROUP_IOC_ADD, &group));
			process = group.id;
		}
		message.args[0] = message.op == GGROUP_OP_RECLAIM ? message.args[3] : 0;
		message.op |= GGROUP_MESSAGE_REPLY;
		HOLDS(write(provider, &message, sizeof(message)) == sizeof(message));
	}
	return NULL;
}

static struct ggroup_books books(int fd, u64 id)
{
	struct ggroup_books found = { .id = id };

	MUST(call(fd, GGROUP_IOC_GET, &found));
	return found;
}

static void control(int fd)
{
	struct ggroup_group slice = {
		.root = root, .parent = root, .kind = GGROUP_KIND_SLICE, .path = "/old.slice",
	};
	struct ggroup_set set = {
		.mask = GGROUP_SET_HIGH | GGROUP_SET_WEIGHT | GGROUP_SET_FROZEN | GGROUP_SET_UID,
		.high = 64 * MIB, .weight = 250, .frozen = 1, .uid = 1000,
	};
	struct ggroup_move move;
	struct ggroup_books found;

	MUST(call(fd, GGROUP_IOC_ADD, &slice));
	set.id = slice.id;
	MUST(call(fd, GGROUP_IOC_SET, &set));
	found = books(fd, slice.id);
	HOLDS(found.high == 64 * MIB && found.weight == 250 && found.frozen == 1 && found.uid == 1000);
	move = (struct ggroup_move){ .id = process, .parent = slice.id };
	MUST(call(fd, GGROUP_IOC_MOVE, &move));
	HOLDS(books(fd, process).parent == slice.id);
	HOLDS(books(fd, slice.id).current_bytes == 8 * MIB);
	MUST(call(fd, GGROUP_IOC_FIND, &slice));
}

static void levers(int fd)
{
	struct ggroup_command command = { .id = process, .value = 5000 };
	struct ggroup_target targets[4];
	struct ggroup_plan plan = { .id = root, .nbytes = MIB, .targets = (u64)(uintptr_t)targets, .capacity = 4 };

	MUST(call(fd, GGROUP_IOC_SET_TIMESLICE, &command));
	HOLDS(books(fd, process).lever_timeslice_us == 5000);
	command.value = 0;
	MUST(call(fd, GGROUP_IOC_DETACH_TSG, &command));
	HOLDS(books(fd, process).flags & GGROUP_BOOKS_DETACHED);
	MUST(call(fd, GGROUP_IOC_ATTACH_TSG, &command));
	command.value = MIB;
	MUST(call(fd, GGROUP_IOC_RECLAIM, &command));
	MUST(call(fd, GGROUP_IOC_PLAN, &plan));
	HOLDS(plan.count == 1 && targets[0].id == process);
}

static void tenant(int fd)
{
	struct ggroup_amount amount = { .nbytes = 9 * MIB };
	struct ggroup_fd usermem = { .flags = O_CLOEXEC | O_NONBLOCK };
	struct ggroup_counters *page;

	MUST(call(fd, GGROUP_IOC_CHARGE, &amount));
	amount.nbytes = MIB;
	amount.usec = 1;
	MUST(call(fd, GGROUP_IOC_SWAP_OUT, &amount));
	MUST(call(fd, GGROUP_IOC_SWAP_IN, &amount));
	amount.usec = 0;
	MUST(call(fd, GGROUP_IOC_UNCHARGE, &amount));
	MUST(call(fd, GGROUP_IOC_USERMEM, &usermem));
	page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	HOLDS(page != MAP_FAILED);
	page->submitted = 7;
	page->finished = 5;
	HOLDS(books(fd, 0).current_bytes == 8 * MIB && books(fd, 0).submitted == 7);
}

int main(void)
{
	struct ggroup_gpu gpu = { .uuid = "GPU-versions", .capacity = 1ULL << 30, .granule = 1 };
	struct ggroup_join join = { .uuid = "GPU-versions" };
	struct ggroup_unregister end = { .flags = GGROUP_UNREGISTER_RELEASED | GGROUP_UNREGISTER_FORGET };
	struct ggroup_hello hello = { 0 };
	int admin = open_device(0), own = open_device(0);
	pthread_t thread;

	provider = open_device(0);
	MUST(call(admin, GGROUP_IOC_HELLO, &hello));
	HOLDS(hello.version == GGROUP_ABI_VERSION && (hello.features & 0x1f) == 0x1f);
	MUST(call(provider, GGROUP_IOC_REGISTER, &gpu));
	root = gpu.root;
	pthread_create(&thread, NULL, provide, NULL);
	MUST(call(own, GGROUP_IOC_JOIN, &join));
	HOLDS(join.id == process && join.root == root);
	tenant(own);
	control(admin);
	levers(admin);
	HOLDS(ops == 0x1f << GGROUP_OP_ARRIVE);
	MUST(call(provider, GGROUP_IOC_UNREGISTER, &end));
	puts("{\"features\": 1}");
	fflush(stdout);
	_exit(0);	/* the thread may wait in read() */
}
