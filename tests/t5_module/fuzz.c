// SPDX-License-Identifier: GPL-2.0
/*
 * fuzz SECONDS [SEED]: everything that can be asked of /dev/ggroup, and much that cannot, by several processes of root
 * and of uid 65534, which are killed in the middle of it. The kernel's log says whether that was right; this program
 * reports how much was reached, and that the module still works.
 *
 * The workers never clean up: they live for a moment and are killed with everything that they hold, whatever they wait
 * for. The supervisor makes sure that there are never too many groups, and the first process that nothing lasts for
 * ever.
 */

#include <grp.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "program.h"

#define WORKERS		6
#define THREADS		3
#define FILES		24
#define IDS		128
#define GPUS		70		/* the module keeps 64 */
#define GROUPS_MOST	3000
#define PETS		8
#define GRACE_S		90
#define NOBODY		65534
#define USES		32		/* processes whose next use one call reports */

static const struct {
	const char *name;
	u32 cmd;
} ioctls[] = {
#define CMD(name) { #name, GGROUP_IOC_##name }
	CMD(HELLO), CMD(JOIN), CMD(CHARGE), CMD(UNCHARGE), CMD(UNCHARGE_SWAP), CMD(SWAP_OUT),
	CMD(SWAP_IN), CMD(USERMEM), CMD(GET), CMD(ADD), CMD(FIND), CMD(NEXT), CMD(MOVE),
	CMD(REMOVE), CMD(SET), CMD(RESET_PEAK), CMD(OBSERVE), CMD(NOTE), CMD(PRESS), CMD(PLAN),
	CMD(SET_TIMESLICE), CMD(ATTACH_TSG), CMD(DETACH_TSG), CMD(RECLAIM), CMD(REGISTER),
	CMD(UNREGISTER), CMD(FORGET), CMD(EVENTS), CMD(REASONS), CMD(NEXT_USE), CMD(SET_SM_MAX),
};

#define KINDS	ARRAY_SIZE(ioctls)

/* Seen by all processes. Nothing here is locked: a reader may get half of one thing and half of another. */
static struct shared {
	u64 ids[IDS];		/* some ids that exist, or existed */
	u64 processes[IDS / 4];	/* some ids of processes */
	u64 roots[GPUS];
	struct {
		s32 pid;
		u64 start;
	} people[2 * PETS];	/* the first half come and go */
	u64 groups;		/* added since the supervisor last forgot all */
	u64 ok[KINDS], refused[KINDS];
	u64 reads, writes, maps, forks, commands, answers;
} *shared;

/* Files of one worker; its threads share them, and disturb each other */
static int files[FILES];
static u8 *guarded;		/* a page, followed by an unmapped one */
static u8 *readonly;
static u64 page;

struct fuzzer {
	pthread_t thread;
	u64 random;
};

#define COUNT(what)	__atomic_fetch_add(&shared->what, 1, __ATOMIC_RELAXED)

static u64 edge(u64 *random)
{
	static const u64 edges[] = {
		0, 1, 2, 7, 4096, 1ULL << 20, 1ULL << 31, 1ULL << 32, 1ULL << 46,
		(1ULL << 46) + 1, GGROUP_MAX - 1, GGROUP_MAX, GGROUP_MAX + 1, ~0ULL - 1, ~0ULL,
	};

	return below(random, 3) ? edges[below(random, ARRAY_SIZE(edges))] : next_random(random);
}

static u64 size(u64 *random)
{
	return below(random, 4) ? below(random, 1 << 20) : edge(random);
}

static u64 any_id(u64 *random)
{
	switch (below(random, 8)) {
	case 0:
		return 0;
	case 1:
		return edge(random);
	case 2 ... 3:
		return shared->roots[below(random, 4)];
	default:
		return shared->ids[below(random, IDS)];
	}
}

static u64 any_process(u64 *random)
{
	return below(random, 8) ? shared->processes[below(random, IDS / 4)] : any_id(random);
}

static void remember(u64 *random, u64 id, u32 kind)
{
	shared->ids[below(random, IDS)] = id;
	if (kind == GGROUP_KIND_PROCESS)
		shared->processes[below(random, IDS / 4)] = id;
}

static void any_uuid(u64 *random, char *uuid)
{
	unsigned int number = below(random, below(random, 8) ? 4 : GPUS);

	memset(uuid, 0, GGROUP_UUID_LEN);
	if (below(random, 16))
		snprintf(uuid, GGROUP_UUID_LEN, "GPU-fuzz-%u", number);
	else if (below(random, 2))
		memset(uuid, 'x', GGROUP_UUID_LEN);
}

static void any_path(u64 *random, char *path)
{
	unsigned int length;

	switch (below(random, 8)) {
	case 0:		/* as long as possible, and one more */
		length = GGROUP_PATH_LEN - 2 + below(random, 3);
		memset(path, 'p', length);
		path[0] = '/';
		if (length < GGROUP_PATH_LEN)
			path[length] = 0;
		return;
	case 1:
		path[0] = below(random, 2) ? 0 : 'x';
		return;
	default:
		snprintf(path, GGROUP_PATH_LEN, "/%u/%u", (u32)below(random, 4),
			 (u32)below(random, 64));
	}
}

/* Mostly valid classes of next use, at the place from which a plan would be read. */
static void any_uses(u64 *random)
{
	struct ggroup_use *use = (struct ggroup_use *)guarded;

	for (int i = 0; i < USES; i++)
		use[i] = (struct ggroup_use) {
			.id = any_process(random),
			.next = below(random, 64) ? below(random, GGROUP_NEXT_USE_MOST + 1) :
				edge(random),
			.reserved = !below(random, 256),
		};
}

/* Build arguments that are mostly valid. */
static void build(u64 *random, unsigned int kind, void *to)
{
	union {
		struct ggroup_gpu gpu;
		struct ggroup_unregister unregister;
		struct ggroup_group group;
		struct ggroup_move move;
		struct ggroup_books books;
		struct ggroup_set set;
		struct ggroup_amount amount;
		struct ggroup_note note;
		struct ggroup_reasons reasons;
		struct ggroup_uses uses;
		struct ggroup_reset reset;
		struct ggroup_plan plan;
		struct ggroup_command command;
		struct ggroup_join join;
		struct ggroup_fd fd;
		u64 id;
	} *arg = to;
	unsigned int who = below(random, ARRAY_SIZE(shared->people));

	arg->id = any_id(random);
	switch (ioctls[kind].cmd) {
	case GGROUP_IOC_JOIN:
		any_uuid(random, arg->join.uuid);
		arg->join.timeout_ms = below(random, 16) ? 1 + below(random, 30) : edge(random);
		break;
	case GGROUP_IOC_CHARGE:
	case GGROUP_IOC_UNCHARGE:
	case GGROUP_IOC_UNCHARGE_SWAP:
	case GGROUP_IOC_SWAP_OUT:
	case GGROUP_IOC_SWAP_IN:
	case GGROUP_IOC_OBSERVE:
	case GGROUP_IOC_PRESS:
		arg->id = any_process(random);
		arg->amount.nbytes = size(random);
		arg->amount.usec = below(random, 8) ? 0 : edge(random);
		break;
	case GGROUP_IOC_USERMEM:
	case GGROUP_IOC_EVENTS:
		arg->fd.flags = below(random, 8) ? O_CLOEXEC | (below(random, 2) ? O_NONBLOCK : 0) :
			next_random(random);
		break;
	case GGROUP_IOC_ADD:
	case GGROUP_IOC_FIND:
		arg->group.root = below(random, 8) ? shared->roots[below(random, 4)] : any_id(random);
		arg->group.parent = below(random, 4) ? arg->group.root : any_id(random);
		arg->group.kind = below(random, 16) ? 1 + below(random, 2) : edge(random);
		arg->group.pid = shared->people[who].pid;
		arg->group.start = shared->people[who].start;
		if (!below(random, 8))
			arg->group.pid = edge(random);
		if (!below(random, 8))
			arg->group.start = edge(random);
		any_path(random, arg->group.path);
		break;
	case GGROUP_IOC_NEXT:
		arg->group.root = below(random, 3) ? any_id(random) : 0;
		arg->group.id = any_id(random);
		break;
	case GGROUP_IOC_MOVE:
		arg->move.parent = any_id(random);
		break;
	case GGROUP_IOC_RESET_PEAK:
		arg->reset.what = below(random, 8) ? below(random, 2) : edge(random);
		break;
	case GGROUP_IOC_SET:
		arg->set = (struct ggroup_set) {
			.id = arg->id,
			.mask = below(random, 8) ? 1U << below(random, 14) : edge(random),
			.high = size(random), .low = size(random), .swap_max = size(random),
			.timeslice_us = size(random), .frozen = below(random, 3),
			.priority = below(random, 18), .weight = below(random, 10002),
			.kept = below(random, 3), .uid = NOBODY, .gid = edge(random),
			.quota_us = 998 + below(random, 4) * 1000,
			.period_us = below(random, 2) ? 100000 : below(random, 1000002),
			.limit_max = below(random, 4) ? GGROUP_MAX : size(random),
			.oom_group = below(random, 3),
		};
		break;
	case GGROUP_IOC_REASONS:
		if (below(random, 8))
			arg->id = any_process(random);
		arg->reasons.off_all = below(random, 8) ? below(random, 0x40) : edge(random);
		arg->reasons.off_gr = below(random, 2) ? 0 : below(random, 0x41);
		break;
	case GGROUP_IOC_NEXT_USE:
		if (below(random, 8))
			arg->uses.root = shared->roots[below(random, 4)];
		any_uses(random);
		arg->uses.uses = below(random, 8) ? (u64)(uintptr_t)guarded : edge(random);
		arg->uses.count = below(random, 8) ? below(random, USES) : edge(random);
		arg->uses.reserved = !below(random, 16);
		break;
	case GGROUP_IOC_NOTE:
		arg->note.event = below(random, GGROUP_EVENT_OOM_GROUP_KILL + 3);
		arg->note.reserved = !below(random, 16);
		break;
	case GGROUP_IOC_PLAN:
		arg->plan.nbytes = size(random);
		arg->plan.targets = below(random, 4) ? (u64)(uintptr_t)guarded : edge(random);
		arg->plan.capacity = below(random, 4) ? below(random, 170) : edge(random);
		break;
	case GGROUP_IOC_SET_TIMESLICE:
	case GGROUP_IOC_SET_SM_MAX:
	case GGROUP_IOC_ATTACH_TSG:
	case GGROUP_IOC_DETACH_TSG:
	case GGROUP_IOC_RECLAIM:
		if (below(random, 8))
			arg->id = any_process(random);
		arg->command.value = below(random, 2) ? 0 : size(random);
		arg->command.timeout_ms = below(random, 32) ? 1 + below(random, 30) : edge(random);
		arg->command.reserved = !below(random, 32);
		break;
	case GGROUP_IOC_REGISTER:
	case GGROUP_IOC_FORGET:
		any_uuid(random, arg->gpu.uuid);
		arg->gpu.capacity = below(random, 4) ? 1 << 24 : edge(random);
		arg->gpu.granule = below(random, 4) ? 1ULL << below(random, 22) : edge(random);
		arg->gpu.headroom = below(random, 2) ? 0 : size(random);
		arg->gpu.root = 0;
		arg->gpu.flags = !below(random, 16);
		break;
	case GGROUP_IOC_UNREGISTER:
		arg->unregister.flags = below(random, 8) ? below(random, 4) : edge(random);
		arg->unregister.reserved = !below(random, 8);
		break;
	}
}

static int any_file(u64 *random)
{
	return files[below(random, FILES)];
}

static void keep_file(u64 *random, int fd)
{
	/* Some files stay as they were opened. */
	int *slot = &files[FILES / 2 + below(random, FILES / 2)], old;

	if (fd < 0)
		return;
	old = __atomic_exchange_n(slot, fd, __ATOMIC_RELAXED);
	if (old > 2)
		close(old);
}

/* Keep results for further tries. */
static void learn(u64 *random, u32 cmd, void *arg)
{
	struct ggroup_group *group = arg;
	struct ggroup_gpu *gpu = arg;

	switch (cmd) {
	case GGROUP_IOC_ADD:
		COUNT(groups);
		remember(random, group->id, group->kind);
		break;
	case GGROUP_IOC_NEXT:
		remember(random, group->id, group->kind);
		break;
	case GGROUP_IOC_JOIN:
		COUNT(groups);
		remember(random, ((struct ggroup_join *)arg)->id, GGROUP_KIND_PROCESS);
		break;
	case GGROUP_IOC_REGISTER:
		shared->roots[atoi(gpu->uuid + strlen("GPU-fuzz-")) % GPUS] = gpu->root;
		break;
	case GGROUP_IOC_USERMEM:
	case GGROUP_IOC_EVENTS:
		keep_file(random, ((struct ggroup_fd *)arg)->fd);
		break;
	}
}

static void fuzz_ioctl(u64 *random)
{
	u8 buffer[sizeof(struct ggroup_group) + 64] __attribute__((aligned(8))) = { 0 };
	unsigned int kind = below(random, KINDS), known, given;
	u32 cmd = ioctls[kind].cmd;
	void *arg = buffer;
	int err;

	/* A GPU that is registered repeatedly stays empty. */
	if ((cmd == GGROUP_IOC_FORGET || cmd == GGROUP_IOC_UNREGISTER) && below(random, 32))
		return;
	if (cmd == GGROUP_IOC_ADD && shared->groups > GROUPS_MOST)
		return;
	build(random, kind, buffer);
	known = given = _IOC_SIZE(cmd);
	if (!below(random, 8))
		given = below(random, 4) ? known + below(random, 64) : below(random, 1 << 14);
	if (!below(random, 16))
		buffer[below(random, known + 8)] ^= 1 << below(random, 8);
	cmd = (cmd & ~(_IOC_SIZEMASK << _IOC_SIZESHIFT)) | given << _IOC_SIZESHIFT;
	if (!below(random, 32))
		cmd ^= 1U << below(random, 32);
	switch (below(random, 16)) {
	case 0:
		arg = (void *)edge(random);
		break;
	case 1:
		arg = readonly;
		break;
	case 2 ... 4:	/* to its last byte, or beyond */
		if (given <= page)
			arg = memcpy(guarded + page - given, buffer,
				     given < sizeof(buffer) ? given : sizeof(buffer));
		if (!below(random, 4))
			arg = (u8 *)arg + 1 + below(random, 8);
		break;
	default:	/* a size beyond the buffer reads what is there */
		if (given > sizeof(buffer))
			arg = guarded;
	}
	err = call(any_file(random), cmd, arg);
	if (err) {
		COUNT(refused[kind]);
	} else if (cmd == ioctls[kind].cmd) {
		COUNT(ok[kind]);
		if (arg == buffer)
			learn(random, cmd, arg);
	}
}

/* Answer commands of a provider's file: rightly, wrongly, twice, late or never. */
static void fuzz_provider(u64 *random)
{
	static struct ggroup_message late[8];
	struct ggroup_message messages[4];
	int fd = any_file(random);
	struct pollfd polled = { .fd = fd, .events = POLLIN };
	ssize_t got;

	if (poll(&polled, 1, below(random, 3)) <= 0 || !(polled.revents & POLLIN))
		return;
	got = read(fd, messages, sizeof(messages));
	COUNT(reads);
	for (ssize_t i = 0; i < got / (ssize_t)sizeof(*messages); i++) {
		struct ggroup_message *message = &messages[i];

		COUNT(commands);
		if (message->op == GGROUP_OP_ARRIVE && below(random, 8) &&
		    shared->groups <= GROUPS_MOST) {
			u64 root = shared->roots[below(random, 4)];
			u64 id = add_process(fd, root, root, message->args[1], message->args[2]);

			if (id) {
				COUNT(groups);
				remember(random, id, GGROUP_KIND_PROCESS);
			}
		}
		message->op |= GGROUP_MESSAGE_REPLY;
		switch (below(random, 8)) {
		case 0:
			message->status = edge(random);
			break;
		case 1:
			((u8 *)message)[below(random, sizeof(*message))] ^= 1 << below(random, 8);
			break;
		case 2:
			late[below(random, ARRAY_SIZE(late))] = *message;
			continue;
		case 3:
			message->status = -(int)below(random, 200);
			break;
		case 4:
			continue;
		default:
			message->args[0] = below(random, 4) ? message->args[3] : edge(random);
		}
		for (unsigned int times = 1 + !below(random, 8); times--;)
			if (write(fd, message, sizeof(*message)) > 0)
				COUNT(answers);
	}
	if (!below(random, 4) && write(fd, late, sizeof(late)) < 0)
		COUNT(writes);
}

static void fuzz_io(u64 *random)
{
	static u8 buffer[1 << 14];
	int fd = any_file(random);
	size_t length = below(random, 4) ? 16UL << below(random, 6) : below(random, sizeof(buffer));
	struct pollfd polled = { .fd = fd, .events = next_random(random) };
	void *where = below(random, 4) ? buffer : (void *)edge(random);
	ssize_t unused;

	switch (below(random, 8)) {
	case 0 ... 1:
		unused = read(fd, where, length);
		COUNT(reads);
		break;
	case 2:
		unused = write(fd, where, length);
		COUNT(writes);
		break;
	case 3:		/* its second half is unmapped */
		unused = read(fd, guarded + page - 96, 128);
		COUNT(reads);
		break;
	case 4:
		unused = pread(fd, buffer, 64, edge(random));
		unused = lseek(fd, edge(random), SEEK_SET);
		break;
	default:
		unused = poll(&polled, 1, below(random, 2));
	}
	(void)unused;
}

static void fuzz_map(u64 *random)
{
	int fd = any_file(random);
	size_t length = below(random, 4) ? page : page * below(random, 4);
	int prot = below(random, 4) ? PROT_READ | PROT_WRITE : (int)below(random, 8);
	int flags = below(random, 4) ? MAP_SHARED : MAP_PRIVATE;
	u64 offset = below(random, 4) ? 0 : page * below(random, 4);
	u64 *map = mmap(NULL, length, prot, flags, fd, offset);

	if (map == MAP_FAILED)
		return;
	COUNT(maps);
	if (prot & PROT_WRITE)
		map[0] = map[1] = next_random(random);
	switch (below(random, 6)) {
	case 0:
		mprotect(map, length, below(random, 8));
		break;
	case 1:
		mremap(map, length, length * 2, MREMAP_MAYMOVE);
		break;
	case 2:
		madvise(map, length, below(random, 26));
		break;
	case 3:
		return;	/* until it is killed */
	}
	munmap(map, length);
}

static void fuzz_files(u64 *random)
{
	int fd = any_file(random), ends[2];

	switch (below(random, 8)) {
	case 0 ... 3:
		keep_file(random, open(DEVICE, (below(random, 8) ? O_RDWR : (int)below(random, 3)) |
				       (below(random, 2) ? O_NONBLOCK : 0) | O_CLOEXEC));
		break;
	case 4:
		keep_file(random, dup(fd));
		break;
	case 5:
		fcntl(fd, F_SETFL, below(random, 2) ? O_NONBLOCK : 0);
		break;
	case 6:		/* a file in flight, with nothing left that knows of it */
		if (!socketpair(AF_UNIX, SOCK_STREAM, 0, ends)) {
			char room[CMSG_SPACE(sizeof(int))] = { 0 }, byte = 0;
			struct iovec iov = { &byte, 1 };
			struct msghdr message = {
				.msg_iov = &iov, .msg_iovlen = 1,
				.msg_control = room, .msg_controllen = sizeof(room),
			};
			struct cmsghdr *header = CMSG_FIRSTHDR(&message);

			header->cmsg_level = SOL_SOCKET;
			header->cmsg_type = SCM_RIGHTS;
			header->cmsg_len = CMSG_LEN(sizeof(int));
			memcpy(CMSG_DATA(header), &fd, sizeof(fd));
			sendmsg(ends[0], &message, MSG_DONTWAIT);
			close(ends[0]);
			close(ends[1]);
		}
		break;
	default:
		keep_file(random, dup(0));
	}
}

static void step(u64 *random);

/* Fork a child with all the files, for a moment; it may have a group, and die while others act on it. */
static void fuzz_fork(u64 *random)
{
	static int children;
	unsigned int who = below(random, PETS);
	pid_t pid;

	if (__atomic_fetch_add(&children, 1, __ATOMIC_RELAXED) > 12)
		return;
	pid = fork();
	if (!pid) {
		u64 mine = *random ^ 0x5555;

		prctl(PR_SET_PDEATHSIG, SIGKILL);
		alarm(1);
		children = 100;
		for (int i = 0; i < 40; i++)
			step(&mine);
		_exit(0);
	}
	if (pid < 0)
		return;
	COUNT(forks);
	shared->people[who].start = start_of(pid);
	shared->people[who].pid = pid;
	if (below(random, 2))
		kill(pid, SIGKILL);
	if (below(random, 2))
		waitpid(pid, NULL, WNOHANG);
}

static void step(u64 *random)
{
	switch (below(random, 64)) {
	case 0 ... 1:
		fuzz_map(random);
		break;
	case 2 ... 5:
		fuzz_files(random);
		break;
	case 6 ... 12:
		fuzz_io(random);
		break;
	case 13 ... 20:
		fuzz_provider(random);
		break;
	case 21:
		if (!below(random, 8))
			fuzz_fork(random);
		break;
	default:
		fuzz_ioctl(random);
	}
}

static void *run(void *data)
{
	struct fuzzer *fuzzer = data;

	for (;;)
		step(&fuzzer->random);
	return NULL;
}

static void limit(int what, rlim_t most)
{
	setrlimit(what, &(struct rlimit) { most, most });
}

/* Never returns. */
static void work(u64 seed, bool nobody)
{
	static struct fuzzer fuzzers[THREADS];
	u64 random = seed_of(seed, 0);

	int other = open("/dev/null", O_RDWR);

	setpgid(0, 0);
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	dup2(other, 0);		/* another user's file that may be written to */
	limit(RLIMIT_NOFILE, 256);
	limit(RLIMIT_CORE, 0);
	limit(RLIMIT_STACK, 1 << 20);
	limit(RLIMIT_AS, 1 << 28);
	page = sysconf(_SC_PAGESIZE);
	guarded = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	readonly = mmap(NULL, page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	mprotect(guarded + page, page, PROT_NONE);
	/* Some were opened by root, as files are that are passed to a process. */
	for (int i = 0; i < FILES; i++) {
		if (nobody && i == FILES / 4 &&
		    (setgroups(0, NULL) || setresgid(NOBODY, NOBODY, NOBODY) ||
		     setresuid(NOBODY, NOBODY, NOBODY)))
			die("cannot become nobody");
		files[i] = open(DEVICE, O_RDWR | O_CLOEXEC | (below(&random, 2) ? O_NONBLOCK : 0));
		if (i < FILES / 4 && below(&random, 2)) {
			u8 arg[sizeof(struct ggroup_gpu)] __attribute__((aligned(8))) = { 0 };
			unsigned int kind = KINDS - 4;	/* REGISTER */

			build(&random, kind, arg);
			if (!call(files[i], GGROUP_IOC_REGISTER, arg))
				learn(&random, GGROUP_IOC_REGISTER, arg);
		}
	}
	shared->people[0].pid = getpid();
	shared->people[0].start = start_of(getpid());
	for (int i = 1; i < THREADS; i++) {
		fuzzers[i].random = seed_of(seed, i);
		pthread_create(&fuzzers[i].thread, NULL, run, &fuzzers[i]);
	}
	fuzzers[0].random = seed_of(seed, 100);
	run(&fuzzers[0]);
}

static void end_worker(pid_t *worker)
{
	if (!*worker)
		return;
	kill(-*worker, SIGKILL);
	kill(*worker, SIGKILL);
	waitpid(*worker, NULL, 0);
	*worker = 0;
}

/* Forget all GPUs, with all that is in them; return how many could not be forgotten. */
static int forget_all(int fd)
{
	u64 deadline = now_ns() + 20 * 1000000000ULL;
	int left;

	/* A killed provider remains one until the last holder of its file has exited. */
	do {
		left = 0;
		for (int i = 0; i < GPUS; i++) {
			char uuid[GGROUP_UUID_LEN];
			int err;

			snprintf(uuid, sizeof(uuid), "GPU-fuzz-%d", i);
			err = forget_gpu(fd, uuid);
			left += err && err != -ENODEV;
		}
		while (waitpid(-1, NULL, WNOHANG) > 0)
			;
		if (left)
			poll(NULL, 0, 10);
	} while (left && now_ns() < deadline);
	shared->groups = 0;
	return left;
}

/* Check that a fresh GPU works, and that its figures are right. */
static int check(int fd)
{
	int provider = open_device(O_NONBLOCK), err;
	u64 root = register_gpu(provider, "GPU-check", 1 << 20, 1, 0), id;
	pid_t pid = fork_idle();
	struct ggroup_books books;

	id = add_process(fd, root, root, pid, start_of(pid));
	err = id ? 0 : -errno;
	err = err ?: amount(fd, GGROUP_IOC_CHARGE, id, 12345, 0);
	err = err ?: amount(fd, GGROUP_IOC_UNCHARGE, id, 345, 0);
	err = err ?: get_books(fd, root, &books);
	if (!err && books.current_bytes != 12000)
		err = -EBADE;
	end_process(pid);
	close(provider);
	return err ?: forget_gpu(fd, "GPU-check");
}

static int report(u64 seed, u64 kills, int left, int checked)
{
	printf("{\"seed\": %llu, \"kills\": %llu, \"left\": %d, \"checked\": %d, \"reads\": %llu, "
	       "\"writes\": %llu, \"maps\": %llu, \"forks\": %llu, \"commands\": %llu, "
	       "\"answers\": %llu, \"ok\": {", (unsigned long long)seed, (unsigned long long)kills,
	       left, checked, (unsigned long long)shared->reads,
	       (unsigned long long)shared->writes, (unsigned long long)shared->maps,
	       (unsigned long long)shared->forks, (unsigned long long)shared->commands,
	       (unsigned long long)shared->answers);
	for (unsigned int i = 0; i < KINDS; i++)
		printf("%s\"%s\": %llu", i ? ", " : "", ioctls[i].name,
		       (unsigned long long)shared->ok[i]);
	printf("}, \"refused\": {");
	for (unsigned int i = 0; i < KINDS; i++)
		printf("%s\"%s\": %llu", i ? ", " : "", ioctls[i].name,
		       (unsigned long long)shared->refused[i]);
	printf("}}\n");
	return left || checked;
}

static int supervise(double seconds, u64 seed)
{
	u64 random = seed_of(seed, 1 << 20), deadline = now_ns() + seconds * 1e9, kills = 0;
	pid_t workers[WORKERS] = { 0 };
	int fd = open_device(0), left;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	prctl(PR_SET_CHILD_SUBREAPER, 1);
	for (int i = PETS; i < 2 * PETS; i++) {
		shared->people[i].pid = fork_idle();
		shared->people[i].start = start_of(shared->people[i].pid);
	}
	while (now_ns() < deadline) {
		unsigned int which = below(&random, WORKERS);

		if (workers[which])
			kills++;
		end_worker(&workers[which]);
		if (shared->groups > GROUPS_MOST) {
			for (int i = 0; i < WORKERS; i++)
				end_worker(&workers[i]);
			forget_all(fd);
		}
		for (unsigned int i = 0; i < WORKERS; i++) {
			u64 next = next_random(&random);

			if (workers[i])
				continue;
			workers[i] = fork();
			if (!workers[i])
				work(next, i % 2);
		}
		poll(NULL, 0, 20 + below(&random, 200));
		while (waitpid(-1, NULL, WNOHANG) > 0)
			;
	}
	for (int i = 0; i < WORKERS; i++)
		end_worker(&workers[i]);
	left = forget_all(fd);
	return report(seed, kills, left, check(fd));
}

/* Show where each process is that does not come back. */
static void show_stuck(void)
{
	fprintf(stderr, "fuzz: stuck\n");
	if (system("for p in /proc/[0-9]*; do [ -s $p/cmdline ] && grep -q fuzz $p/comm && "
		   "for t in $p/task/*; do echo $t; cat $t/stack; done; done >&2"))
		fprintf(stderr, "fuzz: nobody can be asked\n");
}

int main(int argc, char **argv)
{
	double seconds = argc > 1 ? atof(argv[1]) : 10;
	u64 seed = argc > 2 ? strtoull(argv[2], NULL, 0) : now_ns();
	struct timespec most = { seconds + GRACE_S, 0 };
	int status = 0;
	sigset_t set;
	pid_t pid;

	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	fprintf(stderr, "fuzz: seed %llu\n", (unsigned long long)seed);
	sigemptyset(&set);
	sigaddset(&set, SIGCHLD);
	sigprocmask(SIG_BLOCK, &set, NULL);
	pid = fork();
	if (!pid) {
		sigprocmask(SIG_UNBLOCK, &set, NULL);
		exit(supervise(seconds, seed));
	}
	if (sigtimedwait(&set, NULL, &most) < 0) {
		show_stuck();
		kill(pid, SIGKILL);
		return 1;
	}
	waitpid(pid, &status, 0);
	if (!WIFEXITED(status))
		fprintf(stderr, "fuzz: the supervisor was killed by %d\n", WTERMSIG(status));
	return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
