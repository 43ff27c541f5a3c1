// SPDX-License-Identifier: GPL-2.0
/*
 * faults [NAME]: every allocation that the module makes for a call fails once. For each kind of call and
 * n = 1, 2, ... the nth thing that can fail in it is made to fail (/proc/thread-self/fail-nth, see
 * Documentation/fault-injection), until nothing is left to fail. A call that fails must have changed nothing, and the
 * next one must work.
 *
 * The slab allocator itself allocates pages now and then, and does with less if it must: so pages had better be
 * excluded from failing where only slab objects count.
 */

#include "program.h"

#define UUID	"GPU-faults"
#define MOST	300	/* more than can fail in any call */

static int control, tenant, extra, nth;
static u64 root, slice, other, process, last;
static pid_t pid, second;
static u64 second_start;
static struct provider provider;
static void *map;

struct operation {
	const char *name;
	int (*run)(void);	/* 0, or a negated errno */
	void (*undo)(int err);
	bool allocates;
	bool gives;	/* it returns its result after it has acted: EFAULT comes too late */
};

/* A snapshot: every group of the GPU, with its books */
struct snapshot {
	unsigned int count;
	struct ggroup_books books[16];
};

static void look(struct snapshot *snapshot)
{
	struct ggroup_group *next = calloc(1, sizeof(*next));
	int err;

	memset(snapshot, 0, sizeof(*snapshot));
	next->root = root;
	while (!(err = call(control, GGROUP_IOC_NEXT, next))) {
		if (snapshot->count == ARRAY_SIZE(snapshot->books))
			die("too many groups");
		if (get_books(control, next->id, &snapshot->books[snapshot->count++]))
			die("no books");
	}
	if (err != -ENOENT)
		die("cannot look: %d", err);
	free(next);
}

/* Operations */

static int run_open(void)
{
	extra = open(DEVICE, O_RDWR | O_CLOEXEC);
	return extra < 0 ? -errno : 0;
}

static void close_extra(int err)
{
	if (!err)
		close(extra);
}

static int run_register(void)
{
	struct ggroup_gpu arg = {
		.uuid = "GPU-faults-2", .capacity = 1 << 20, .granule = 1,
	};

	return call(extra, GGROUP_IOC_REGISTER, &arg);
}

static void undo_register(int err)
{
	close(extra);
	extra = open_device(0);
	if (!err || err == -EFAULT)
		forget_gpu(control, "GPU-faults-2");
}

static int run_add_slice(void)
{
	last = add_slice(control, root, slice, "/faults/new");
	return last ? 0 : -errno;
}

static int run_add_process(void)
{
	last = add_process(control, root, slice, second, second_start);
	return last ? 0 : -errno;
}

static void undo_add(int err)
{
	struct snapshot now;

	look(&now);
	/* Ids only grow: the new one is the greatest, and was not there before. */
	last = now.books[now.count - 1].id;
	if ((!err || err == -EFAULT) && last > process && last > other &&
	    call(control, GGROUP_IOC_REMOVE, &(struct ggroup_id) { last }))
		die("cannot remove what was added");
}

static int run_remove(void)
{
	return call(control, GGROUP_IOC_REMOVE, &(struct ggroup_id) { other });
}

static void undo_remove(int err)
{
	if (err)
		return;
	other = add_slice(control, root, root, "/other");
	if (!other)
		die("cannot add what was removed");
}

static int run_join(void)
{
	return join(extra, UUID, 0, NULL);
}

static void undo_join(int err)
{
	(void)err;
	close(extra);
	extra = open_device(0);
}

static int run_usermem(void)
{
	struct ggroup_fd arg = { .id = 0, .flags = O_CLOEXEC };
	int err = call(tenant, GGROUP_IOC_USERMEM, &arg);

	extra = arg.fd;
	return err;
}

static int run_events(void)
{
	struct ggroup_fd arg = { .id = root, .flags = O_CLOEXEC };
	int err = call(control, GGROUP_IOC_EVENTS, &arg);

	extra = arg.fd;
	return err;
}

static int run_mmap(void)
{
	map = mmap(NULL, sysconf(_SC_PAGESIZE), PROT_READ | PROT_WRITE, MAP_SHARED, tenant, 0);
	return map == MAP_FAILED ? -errno : 0;
}

static void undo_mmap(int err)
{
	if (!err)
		munmap(map, sysconf(_SC_PAGESIZE));
}

static int run_plan(void)
{
	struct ggroup_target targets[16];
	struct ggroup_plan arg = {
		.id = root, .nbytes = 100, .targets = (uintptr_t)targets,
		.capacity = ARRAY_SIZE(targets),
	};

	return call(control, GGROUP_IOC_PLAN, &arg);
}

static int run_get(void)
{
	struct ggroup_books books;

	return get_books(control, process, &books);
}

static int run_next(void)
{
	static struct ggroup_group arg;

	arg.root = root;
	arg.id = 0;
	return call(control, GGROUP_IOC_NEXT, &arg);
}

static int run_find(void)
{
	static struct ggroup_group arg;

	arg.root = root;
	arg.kind = GGROUP_KIND_SLICE;
	strcpy(arg.path, "/slice");
	return call(control, GGROUP_IOC_FIND, &arg);
}

static int run_move(void)
{
	return call(control, GGROUP_IOC_MOVE, &(struct ggroup_move) { process, other });
}

static void undo_move(int err)
{
	if (!err && call(control, GGROUP_IOC_MOVE, &(struct ggroup_move) { process, slice }))
		die("cannot move back");
}

static int run_set(void)
{
	struct ggroup_set arg = { .id = other, .mask = GGROUP_SET_HIGH, .high = 12345 };

	return call(control, GGROUP_IOC_SET, &arg);
}

static void undo_set(int err)
{
	struct ggroup_set arg = { .id = other, .mask = GGROUP_SET_HIGH, .high = GGROUP_MAX };

	if (!err && call(control, GGROUP_IOC_SET, &arg))
		die("cannot set back");
}

static int run_charge(void)
{
	return amount(control, GGROUP_IOC_CHARGE, process, 10, 0);
}

static void undo_charge(int err)
{
	if (!err && amount(control, GGROUP_IOC_UNCHARGE, process, 10, 0))
		die("cannot uncharge");
}

static int run_swap_out(void)
{
	return amount(control, GGROUP_IOC_SWAP_OUT, process, 10, 1);
}

static void undo_swap_out(int err)
{
	if (!err && amount(control, GGROUP_IOC_SWAP_IN, process, 10, 1))
		die("cannot swap in");
}

static int run_observe(void)
{
	return amount(control, GGROUP_IOC_OBSERVE, process, 2000, 0);
}

static void undo_observe(int err)
{
	if (!err && amount(control, GGROUP_IOC_OBSERVE, process, 1000, 0))
		die("cannot observe");
}

static int run_press(void)
{
	return amount(control, GGROUP_IOC_PRESS, process, 1, 0);
}

static int run_note(void)
{
	struct ggroup_note arg = { .id = process, .event = GGROUP_EVENT_LOW };

	return call(control, GGROUP_IOC_NOTE, &arg);
}

static int command(unsigned long cmd, u64 id, u64 value)
{
	struct ggroup_command arg = { .id = id, .value = value };

	return call(control, cmd, &arg);
}

static int run_timeslice(void)
{
	static u64 value = 1000;

	return command(GGROUP_IOC_SET_TIMESLICE, process, ++value);
}

static int run_detach(void)
{
	return command(GGROUP_IOC_DETACH_TSG, process, 0);
}

static void undo_detach(int err)
{
	(void)err;
	if (command(GGROUP_IOC_ATTACH_TSG, process, 0))
		die("cannot attach");
}

static int run_reclaim(void)
{
	return command(GGROUP_IOC_RECLAIM, slice, 100);
}

static int run_forget(void)
{
	return forget_gpu(control, "GPU-faults-2");
}

static void prepare_forget(void)
{
	register_gpu(extra, "GPU-faults-2", 1, 1, 0);
	close(extra);
	extra = open_device(0);
}

static void undo_forget(int err)
{
	if (err)
		forget_gpu(control, "GPU-faults-2");
	prepare_forget();
}

static void nothing(int err)
{
	(void)err;
}

static const struct operation operations[] = {
	{ "open", run_open, close_extra, true, false },
	{ "register", run_register, undo_register, true, true },
	{ "add_slice", run_add_slice, undo_add, true, true },
	{ "add_process", run_add_process, undo_add, true, true },
	{ "remove", run_remove, undo_remove, false, false },
	{ "join", run_join, undo_join, false, true },
	{ "usermem", run_usermem, close_extra, true, false },
	{ "events", run_events, close_extra, true, false },
	{ "mmap", run_mmap, undo_mmap, true, false },
	{ "plan", run_plan, nothing, true, false },
	{ "get", run_get, nothing, false, false },
	{ "next", run_next, nothing, true, false },
	{ "find", run_find, nothing, true, false },
	{ "move", run_move, undo_move, false, false },
	{ "set", run_set, undo_set, false, false },
	{ "charge", run_charge, undo_charge, false, false },
	{ "swap_out", run_swap_out, undo_swap_out, false, false },
	{ "observe", run_observe, undo_observe, false, false },
	{ "press", run_press, nothing, false, false },
	{ "note", run_note, nothing, false, false },
	{ "set_timeslice", run_timeslice, nothing, false, false },
	{ "detach", run_detach, undo_detach, false, false },
	/* The first program may have given before the second could not be asked. */
	{ "reclaim", run_reclaim, nothing, true, true },
	{ "forget", run_forget, undo_forget, false, false },
};

/* Injection */

static void inject(unsigned int which)
{
	char text[16];
	int length = snprintf(text, sizeof(text), "%u", which);

	if (pwrite(nth, text, length, 0) != length)
		die("cannot inject");
}

/* Return whether the fault was injected; switch injection off. */
static bool injected(void)
{
	char text[16] = "";

	if (pread(nth, text, sizeof(text) - 1, 0) <= 0)
		die("cannot ask what was injected");
	inject(0);
	return atoi(text) == 0;
}

static bool plausible(int err)
{
	return err == -ENOMEM || err == -EFAULT || err == -EMFILE || err == -ENFILE;
}

static int attempt(const struct operation *operation, bool *hit, int *failed)
{
	static struct snapshot before, after;
	unsigned int which;
	int wrong = 0;

	*failed = 0;
	for (which = 1; which <= MOST; which++) {
		int err;

		look(&before);
		inject(which);
		err = operation->run();
		*hit = injected();
		if (!*hit) {
			if (err) {
				fprintf(stderr, "%s: %d by itself\n", operation->name, err);
				wrong++;
			}
			operation->undo(err);
			break;
		}
		if (err) {
			++*failed;
			look(&after);
			if (!plausible(err)) {
				fprintf(stderr, "%s: %d for the %u-th\n", operation->name, err, which);
				wrong++;
			}
			if (memcmp(&before, &after, sizeof(before)) &&
			    !(operation->gives && err == -EFAULT)) {
				fprintf(stderr, "%s: changed something, and failed with %d for the %u-th\n",
					operation->name, err, which);
				wrong++;
			}
		}
		operation->undo(err);
	}
	if (which > MOST) {
		fprintf(stderr, "%s: no end of what can fail\n", operation->name);
		wrong++;
	}
	if (operation->allocates && !*failed) {
		fprintf(stderr, "%s: nothing failed, though it allocates\n", operation->name);
		wrong++;
	}
	return wrong;
}

int main(int argc, char **argv)
{
	pthread_t server;
	int wake[2], wrong = 0;

	nth = open("/proc/thread-self/fail-nth", O_RDWR | O_CLOEXEC);
	if (nth < 0)
		die("this kernel injects nothing");
	control = open_device(0);
	tenant = open_device(0);
	extra = open_device(0);
	provider.fd = open_device(O_NONBLOCK);
	provider.root = root = register_gpu(provider.fd, UUID, 1 << 20, 1, 0);
	slice = add_slice(control, root, root, "/slice");
	pid = fork_idle();
	second = fork_idle();
	second_start = start_of(second);
	process = add_process(control, root, slice, pid, start_of(pid));
	provider.parent = slice;
	if (!process || pipe2(wake, O_CLOEXEC))
		die("cannot begin");
	provider.stop = wake[0];
	pthread_create(&server, NULL, serve, &provider);
	if (join(tenant, UUID, 0, NULL) || amount(control, GGROUP_IOC_CHARGE, process, 1000, 0))
		die("cannot join and charge");
	other = add_slice(control, root, root, "/other");

	printf("{");
	for (size_t i = 0; i < ARRAY_SIZE(operations); i++) {
		bool hit;
		int failed;

		if (argc > 1 && strcmp(argv[1], operations[i].name))
			continue;
		if (operations[i].run == run_forget)
			prepare_forget();
		wrong += attempt(&operations[i], &hit, &failed);
		printf("\"%s\": %d, ", operations[i].name, failed);
		fflush(stdout);
		if (operations[i].undo == close_extra)
			extra = open_device(0);
	}
	printf("\"wrong\": %d}\n", wrong);
	close(wake[1]);
	pthread_join(server, NULL);
	end_process(pid);
	end_process(second);
	close(provider.fd);
	close(tenant);
	forget_gpu(control, "GPU-faults-2");
	if (forget_gpu(control, UUID))
		die("cannot forget the GPU");
	return wrong ? 1 : 0;
}
