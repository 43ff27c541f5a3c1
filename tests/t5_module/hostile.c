// SPDX-License-Identifier: GPL-2.0
/*
 * hostile SECONDS [SEED]: programs of a hostile user beside one of another user.
 *
 * TENANTS processes of uid 65534 with 2 to 4 threads each make two calls at the same time, at each step another of the
 * possible pairs: ioctls on their own group with impossible figures, fork, exec, and in a user namespace of their own
 * what only root may do. They are killed and come again. Beside them, at each step, root makes the calls of owners and
 * providers: MOVE, REMOVE, SET, OBSERVE and the rest.
 *
 *	root
 *	  /t		all of the tenants
 *	    /t/a /t/b	they are moved between these
 *	    /t/tight	a high and a swap_max that refuse; a tenant comes here empty
 *	  /n		the neighbour: charges and uncharges 1 MiB, and must always succeed
 *
 * After each of root's calls, with all threads going on, no figure may be impossible. Now and then all of them are
 * stopped: then each group holds what those below it do, to the byte. In some steps the tenants only spin: compared
 * with these, the neighbour's calls may not take much longer in the others.
 */

#include <dirent.h>
#include <grp.h>
#include <sched.h>
#include <sys/mman.h>

#include "program.h"

#define UUID		"GPU-hostile"
#define HOSTILE		65534
#define NEIGHBOUR	65533
#define TENANTS		4
#define THREADS_MOST	4
#define MIB		(1ULL << 20)
#define CAPACITY	(1024 * MIB)
#define SHARE		MIB			/* bytes that the neighbour charges */
#define OBSERVED_MOST	(2 * CAPACITY)
#define POSSIBLE	(GGROUP_OVERCOMMIT * CAPACITY + OBSERVED_MOST)
#define STEP_NS		30000000ULL
#define SPIN_NS		100000000ULL
#define DUEL_NS		200000000ULL		/* after root's call */
#define DUEL_CALLS	64			/* with only a pause in between */
#define PAUSE_MOST	1000			/* rounds of a loop */
#define MET_CALLS	400000ULL		/* of CHARGE and UNCHARGE */
#define LONGER_MOST	5			/* factor by which a run is prolonged until enough pairs have met */
#define WINDOW_NS	50000000ULL		/* of the neighbour's calls, each with its worst one */
#define WINDOWS_MOST	65536
#define CALLS_A_STEP	4			/* of root */
#define QUIET_EVERY	8			/* steps, after which all are stopped */
#define SPIN_STEPS	4			/* in a row of the same mode */
#define SPIN_EVERY	6			/* rows, after which the tenants only spin in one */
#define FILES_MOST	48			/* descriptors of a tenant */
#define LINK_MOST	1024			/* bytes per nanosecond, as in kmod/charge.c */
#define GROUPS_MOST	256
#define TOLD_MOST	4			/* lines per kind */

enum tenant_call {
	CHARGE, UNCHARGE, UNCHARGE_SWAP, SWAP_OUT, SWAP_IN,
	FIGURES,			/* calls before this one change figures */
	GET = FIGURES, USERMEM, JOIN, COUNTERS, ROOTS, FORK, EXEC, UNSHARE, TENANT_CALLS
};

static const char *const tenant_names[TENANT_CALLS] = {
	"CHARGE", "UNCHARGE", "UNCHARGE_SWAP", "SWAP_OUT", "SWAP_IN", "GET", "USERMEM", "JOIN",
	"counters", "root's", "fork", "exec", "unshare",
};

enum root_call {
	MOVE, REMOVE, SET, RESET_PEAK, OBSERVE, NOTE, PRESS, PLAN, RECLAIM, LESS, OUT, EXIT, CHURN,
	ROOT_CALLS
};

static const char *const root_names[ROOT_CALLS] = {
	"MOVE", "REMOVE", "SET", "RESET_PEAK", "OBSERVE", "NOTE", "PRESS", "PLAN", "RECLAIM",
	"root's UNCHARGE", "root's SWAP_OUT", "exit", "ADD",
};

/* Kinds of faults. */
enum kind { FIGURE, SUM, NEIGHBOURS, PLANNED, MOVED, FILES, TREE, KINDS };

static const char *const kind_names[KINDS] = {
	"figure", "sum", "neighbour", "plan", "moved", "files", "tree",
};

/* Modes of the tenants: all of them call; one calls and the others sleep; or all spin. */
enum mode { CROWD, DUEL, SPIN, MODES };

struct tenant {
	pid_t pid;
	u64 id;
	u64 generation, execed;
	u32 threads;
	bool idle;
	u64 size;			/* of all its charges; 0 for any */
	u32 call[2];			/* of even-numbered threads, and of the others */
	u64 done[TENANT_CALLS], refused[TENANT_CALLS];
};

/* Seen by all processes. The tenants could write here too: they are ours, and only misbehave in their calls. */
struct shared {
	u64 seed;
	u64 step;			/* the fields below belong to it */
	u32 mode;			/* enum mode */
	bool pause, paused;		/* for the neighbour */
	struct tenant tenants[TENANTS];
	u64 let_through;		/* calls for root alone that a tenant could make */
	pid_t neighbour;
	u64 neighbour_id;
	u64 asked, granted;
	int neighbour_errno;
	u64 worst_ns[MODES][WINDOWS_MOST];	/* the neighbour's call that took longest, by window */
	u64 windows[MODES];
};

static struct shared *shared;
static int shared_fd, control;
static u64 root, top, loose[2], tight, friendly, born_ns;
static struct provider provider;
static pthread_mutex_t serving = PTHREAD_MUTEX_INITIALIZER;
static u64 killed, quiet, root_calls, looked, arrived;
static int wrong[KINDS];
static bool met[TENANT_CALLS][TENANT_CALLS], met_root[TENANT_CALLS][ROOT_CALLS];

/* Something is wrong: the first few of each kind are reported in full. */
__attribute__((format(printf, 2, 3)))
static void complain(enum kind kind, const char *format, ...)
{
	va_list args;

	if (wrong[kind]++ >= TOLD_MOST)
		return;
	fprintf(stderr, "step %llu,", (unsigned long long)shared->step);
	for (u32 i = 0; i < TENANTS; i++)
		fprintf(stderr, " %s with %s%s", tenant_names[shared->tenants[i].call[0]],
			tenant_names[shared->tenants[i].call[1]], i < TENANTS - 1 ? "," : ": ");
	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fputc('\n', stderr);
}

static bool is_spin(u64 step)
{
	return step / SPIN_STEPS % SPIN_EVERY == SPIN_EVERY - 1;
}

static void map_shared(void)
{
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED, shared_fd, 0);
	if (shared == MAP_FAILED)
		die("mmap");
}

static void become(uid_t uid)
{
	if (setpriority(PRIO_PROCESS, 0, 0) || setgroups(0, NULL) || setgid(uid) || setuid(uid))
		die("setuid");
}

/* The tenants */

static int own_fd;
static u32 own_number;

/* Another thread can take what one charges only while it is in flight: so the sizes are few, or one. */
static u64 any_size(u64 *random)
{
	u64 only = shared->tenants[own_number].size;
	static const u64 sizes[] = {
		1, 4096, MIB, CAPACITY / 16, CAPACITY + 2 * MIB, 4 * CAPACITY, 15 * CAPACITY,
		17 * CAPACITY, 1ULL << 46, GGROUP_MAX, ~0ULL, 0,
	};

	return only ?: sizes[below(random, below(random, 4) ? 6 : ARRAY_SIZE(sizes))];
}

static u64 any_usec(u64 *random)
{
	return below(random, 2) ? ~0ULL >> below(random, 64) : below(random, 100);
}

static int usermem(u64 *random)
{
	struct ggroup_fd arg = { .flags = O_NONBLOCK | O_CLOEXEC };
	struct ggroup_pressure record;
	int err = call(own_fd, GGROUP_IOC_USERMEM, &arg);

	if (err)
		return err;
	if (below(random, 2) && read(arg.fd, &record, sizeof(record)) < 0)
		err = -errno;
	close(arg.fd);
	return err;
}

static int join_again(void)
{
	int fd = open(DEVICE, O_RDWR | O_CLOEXEC), err;

	if (fd < 0)
		return -errno;
	err = join(fd, UUID, 100, NULL);
	close(fd);
	return err;
}

static int count(u64 *random)
{
	struct ggroup_counters *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, own_fd, 0);

	if (page == MAP_FAILED)
		return -errno;
	page->submitted = next_random(random);
	page->finished = next_random(random);
	munmap(page, 4096);
	return 0;
}

/* Try any call for root alone, on any group: it must be refused. */
static int try_roots(int fd, u64 *random)
{
	u64 ids[] = { root, top, loose[0], tight, friendly, shared->neighbour_id,
		      shared->tenants[below(random, TENANTS)].id };
	u64 id = ids[below(random, ARRAY_SIZE(ids))];
	struct ggroup_set set = { .id = id, .mask = GGROUP_SET_HIGH, .high = GGROUP_MAX };
	struct ggroup_move move = { .id = id, .parent = friendly };
	struct ggroup_command command = { .id = id, .value = 1, .timeout_ms = 1 };
	struct ggroup_note note = { .id = id };
	struct ggroup_plan plan = { .id = id };
	struct ggroup_id remove = { .id = id };
	struct ggroup_gpu gpu = { .uuid = UUID, .capacity = 1, .granule = 1 };
	struct ggroup_books books;
	bool own = !id || id == shared->tenants[own_number].id;
	int err;

	switch (below(random, 12)) {
	case 0: err = call(fd, GGROUP_IOC_SET, &set); break;
	case 1: err = call(fd, GGROUP_IOC_MOVE, &move); break;
	case 2: err = call(fd, GGROUP_IOC_REMOVE, &remove); break;
	case 3: err = amount(fd, GGROUP_IOC_OBSERVE, id, 0, 0); break;
	case 4: err = call(fd, GGROUP_IOC_NOTE, &note); break;
	case 5: err = call(fd, GGROUP_IOC_PLAN, &plan); break;
	case 6: err = call(fd, GGROUP_IOC_RECLAIM, &command); break;
	case 7: err = call(fd, GGROUP_IOC_DETACH_TSG, &command); break;
	case 8: err = call(fd, GGROUP_IOC_REGISTER, &gpu); break;
	case 9: err = call(fd, GGROUP_IOC_FORGET, &gpu); break;
	case 10: err = own ? -EPERM : get_books(fd, id, &books); break;
	default: err = own ? -EPERM : amount(fd, GGROUP_IOC_UNCHARGE, id, 1, 0);
	}
	if (!err)
		__atomic_add_fetch(&shared->let_through, 1, __ATOMIC_RELAXED);
	return err;
}

/* A child has none of its parent's rights, whatever namespace it makes; its file is its own. */
static int in_a_child(bool unshared, u64 *random)
{
	pid_t pid = fork();
	int status;

	if (pid < 0)
		return -errno;
	if (!pid) {
		int fd;

		if (unshared && unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS))
			_exit(1);
		fd = open(DEVICE, O_RDWR | O_CLOEXEC);
		for (int i = 0; fd >= 0 && i < 12; i++)
			try_roots(i & 1 ? fd : own_fd, random);
		if (!amount(own_fd, GGROUP_IOC_CHARGE, 0, 1, 0) ||
		    !amount(own_fd, GGROUP_IOC_UNCHARGE, 0, 1, 0))
			__atomic_add_fetch(&shared->let_through, 1, __ATOMIC_RELAXED);
		_exit(0);
	}
	while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
		;
	return status ? -EPERM : 0;
}

static int exec_again(void)
{
	char number[16], fd[16];
	char *words[] = { (char *)"hostile", (char *)"tenant", number, fd, NULL };
	char *none[] = { NULL };

	snprintf(number, sizeof(number), "%u", own_number);
	snprintf(fd, sizeof(fd), "%d", shared_fd);
	execve("/proc/self/exe", words, none);
	return -errno;
}

static int perform(enum tenant_call what, u64 *random)
{
	struct ggroup_books books;

	switch (what) {
	case CHARGE:
		return amount(own_fd, GGROUP_IOC_CHARGE, 0, any_size(random), 0);
	case UNCHARGE:
		return amount(own_fd, GGROUP_IOC_UNCHARGE, 0, any_size(random), 0);
	case UNCHARGE_SWAP:
		return amount(own_fd, GGROUP_IOC_UNCHARGE_SWAP, 0, any_size(random), 0);
	case SWAP_OUT:
		return amount(own_fd, GGROUP_IOC_SWAP_OUT, 0, any_size(random), any_usec(random));
	case SWAP_IN:
		return amount(own_fd, GGROUP_IOC_SWAP_IN, 0, any_size(random), any_usec(random));
	case GET:
		return get_books(own_fd, 0, &books);
	case USERMEM:
		return usermem(random);
	case JOIN:
		return join_again();
	case COUNTERS:
		return count(random);
	case ROOTS:
		return try_roots(own_fd, random);
	case EXEC:
		/* Counted before, since it does not return. */
		__atomic_add_fetch(&shared->tenants[own_number].done[EXEC], 1, __ATOMIC_RELAXED);
		return exec_again();
	default:
		return in_a_child(what == UNSHARE, random);
	}
}

/*
 * An amount that is in flight between two threads is there for a few instructions out of some thousand. So threads that
 * make one call have a processor, those that make the other have another, and where one waits for a lock the next runs.
 */
static void pin(u64 number)
{
	cpu_set_t processors;

	CPU_ZERO(&processors);
	CPU_SET(number & 1, &processors);
	sched_setaffinity(0, sizeof(processors), &processors);	/* fails where there is only one */
}

/* Threads that wait for each other's locks fall into step, and then never meet: so each pause is different. */
static int perform_often(enum tenant_call what, const struct tenant *tenant, u64 *random)
{
	unsigned long cmd = what == CHARGE ? GGROUP_IOC_CHARGE : GGROUP_IOC_UNCHARGE;
	struct ggroup_amount arg = { .nbytes = tenant->size };
	int err = 0;

	for (int i = 0; i < DUEL_CALLS; i++) {
		err = call(own_fd, cmd, &arg);
		for (volatile u64 pause = below(random, PAUSE_MOST); pause; pause--)
			;
	}
	return err;
}

static void *attack(void *data)
{
	u64 number = (uintptr_t)data, last = 0, spun = 0;
	struct tenant *tenant = &shared->tenants[own_number];
	u64 random = seed_of(shared->seed, 1 + own_number * 1000 + number +
			     tenant->generation * 100000);

	pin(number);
	for (;;) {
		u64 step = __atomic_load_n(&shared->step, __ATOMIC_ACQUIRE);
		enum tenant_call what = tenant->call[number & 1];
		u64 calls = 1;
		int err;

		if (shared->mode == DUEL && tenant->idle) {
			usleep(20000);	/* timers cost more there than the calls */
			continue;
		}
		if (shared->mode == SPIN) {
			for (int i = 0; i < 1000; i++)
				spun += next_random(&random);
			continue;
		}
		/* Calls that make a process are made once a step, or nothing else would be done. */
		if (what >= FORK && step == last)
			what = GET;
		/* One thread of a process execs, which ends the others. */
		if (what == EXEC && (number > 1 || tenant->execed == step))
			what = GET;
		if (what == EXEC)
			tenant->execed = step;
		last = step;
		if (shared->mode == DUEL && tenant->size && what <= UNCHARGE) {
			calls = DUEL_CALLS;
			err = perform_often(what, tenant, &random);
		} else {
			err = perform(what, &random);
		}
		if (err == -ENODEV)
			_exit(0);	/* its group was removed, so it comes again */
		__atomic_add_fetch(err ? &tenant->refused[what] : &tenant->done[what], calls,
				   __ATOMIC_RELAXED);
	}
	return (void *)(uintptr_t)spun;
}

__attribute__((noreturn))
static void run_tenant(u32 number)
{
	struct tenant *tenant = &shared->tenants[number];
	pthread_t thread;
	u64 id;

	own_number = number;
	own_fd = open(DEVICE, O_RDWR | O_CLOEXEC);
	if (own_fd < 0 || join(own_fd, UUID, 0, &id))
		_exit(0);
	tenant->id = id;
	for (uintptr_t i = 1; i < tenant->threads; i++)
		pthread_create(&thread, NULL, attack, (void *)i);
	attack(NULL);
	_exit(0);
}

/* Close all files of root's but the shared ones. */
static void close_files(void)
{
	close_range(3, shared_fd - 1, 0);
	close_range(shared_fd + 1, ~0U, 0);
}

static void start_tenant(u32 number, u64 *random)
{
	struct tenant *tenant = &shared->tenants[number];
	pid_t parent = getpid(), pid;

	tenant->id = 0;
	tenant->generation++;
	tenant->threads = 2 + below(random, THREADS_MOST - 1);
	pid = fork();
	if (pid < 0)
		die("fork");
	if (!pid) {
		close_files();
		become(HOSTILE);
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (getppid() != parent)
			_exit(0);
		run_tenant(number);
	}
	tenant->pid = pid;
}

/* The neighbour */

static int timed_amount(int fd, unsigned long cmd)
{
	static u64 opened, worst;
	static u32 mode;
	u64 begun = now_ns(), now;
	int err = amount(fd, cmd, 0, SHARE, 0);

	now = now_ns();
	if (now - begun > worst)
		worst = now - begun;
	if (mode == shared->mode && now - opened < WINDOW_NS)
		return err;
	if (mode == shared->mode && shared->windows[mode] < WINDOWS_MOST)
		shared->worst_ns[mode][shared->windows[mode]++] = worst;
	mode = shared->mode;
	opened = now;
	worst = 0;
	return err;
}

__attribute__((noreturn))
static void run_neighbour(void)
{
	int fd = open_device(0);
	u64 id;

	if (join(fd, UUID, 60000, &id))
		die("the neighbour cannot join");
	shared->neighbour_id = id;
	for (;;) {
		int err;

		shared->paused = shared->pause;
		if (shared->paused) {
			usleep(200);
			continue;
		}
		if (shared->mode == DUEL)
			usleep(10000);	/* leaves a processor to each of the two */
		err = timed_amount(fd, GGROUP_IOC_CHARGE);
		shared->asked++;
		if (!err)
			err = timed_amount(fd, GGROUP_IOC_UNCHARGE);
		if (err)
			shared->neighbour_errno = err;
		else
			shared->granted++;
	}
}

static void start_neighbour(void)
{
	pid_t parent = getpid(), pid = fork();

	if (!pid) {
		close_files();
		become(NEIGHBOUR);
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (getppid() != parent)
			_exit(0);
		run_neighbour();
	}
	shared->neighbour = pid;
	while (!__atomic_load_n(&shared->neighbour_id, __ATOMIC_ACQUIRE)) {
		if (waitpid(pid, NULL, WNOHANG) == pid)
			die("the neighbour ended");
		usleep(1000);
	}
}

/* The provider */

/* Answer a request to move memory: with nothing, any amount, an error, or what was really moved. */
static void give(struct ggroup_message *message, u64 *random)
{
	u64 id = message->args[0], nbytes = message->args[3];

	message->args[0] = 0;
	if (id == shared->neighbour_id || shared->mode == DUEL)
		return;
	switch (below(random, 4)) {
	case 0:
		break;
	case 1:
		message->args[0] = next_random(random) >> below(random, 64);
		break;
	case 2:
		message->status = -(s32)(1 + below(random, 4000));
		break;
	default:
		if (!amount(provider.fd, GGROUP_IOC_SWAP_OUT, id, nbytes, 1))
			message->args[0] = nbytes;
	}
}

static void answer(struct ggroup_message *message, u64 *random)
{
	if (message->op == GGROUP_OP_ARRIVE) {
		bool good = (pid_t)message->args[1] == shared->neighbour;
		u64 parent = good ? friendly : below(random, 3) ? loose[below(random, 2)] : tight;

		if (!add_process(provider.fd, root, parent, message->args[1], message->args[2]) &&
		    errno != EEXIST)
			message->status = -errno;
		message->args[0] = 0;
		arrived++;
	} else if (message->op == GGROUP_OP_RECLAIM) {
		give(message, random);
	} else {
		message->args[0] = 0;
	}
	message->op |= GGROUP_MESSAGE_REPLY;
	if (write(provider.fd, message, sizeof(*message)) < 0 && errno != EINVAL)
		die("cannot answer");
	provider.served++;
}

static void *serve_all(void *data)
{
	u64 random = seed_of(shared->seed, 7777777);
	struct pollfd polled[2] = {
		{ .fd = provider.fd, .events = POLLIN },
		{ .fd = provider.stop, .events = POLLIN },
	};
	struct ggroup_message messages[16];

	while (poll(polled, 2, -1) >= 0 && !polled[1].revents) {
		ssize_t got;

		pthread_mutex_lock(&serving);
		got = read(provider.fd, messages, sizeof(messages));
		for (size_t i = 0; got > 0 && i < got / sizeof(*messages); i++)
			answer(&messages[i], &random);
		pthread_mutex_unlock(&serving);
	}
	return data;
}

/* Root */

static void end_tenant(u32 number)
{
	struct tenant *tenant = &shared->tenants[number];

	if (tenant->pid)
		end_process(tenant->pid);
	tenant->pid = 0;
	killed++;
}

static struct ggroup_group *groups;
static unsigned int groups_count;

/* List all groups of the GPU. */
static void list_groups(void)
{
	struct ggroup_group next = { .id = 0 };
	int err;

	groups_count = 0;
	for (next.root = root; !(err = call(control, GGROUP_IOC_NEXT, &next)); next.root = root) {
		if (groups_count == GROUPS_MOST)
			die("too many groups");
		groups[groups_count++] = next;
	}
	if (err != -ENOENT)
		complain(TREE, "NEXT: %d", err);
}

/* Remove exited processes, as a provider does. */
static void remove_dead(void)
{
	struct ggroup_books books;

	list_groups();
	for (unsigned int i = 0; i < groups_count; i++) {
		struct ggroup_id id = { groups[i].id };

		if (groups[i].kind == GGROUP_KIND_PROCESS && !get_books(control, id.id, &books) &&
		    (books.flags & GGROUP_BOOKS_DEAD))
			call(control, GGROUP_IOC_REMOVE, &id);
	}
}

static void check_plan(u64 id, u64 nbytes)
{
	struct ggroup_target targets[64];
	struct ggroup_plan plan = {
		.id = id, .nbytes = nbytes, .targets = (uintptr_t)targets, .capacity = ARRAY_SIZE(targets),
	};
	u64 sum = 0;
	int err = call(control, GGROUP_IOC_PLAN, &plan);

	for (unsigned int i = 0; !err && i < plan.count; i++) {
		if (targets[i].nbytes > POSSIBLE)
			complain(PLANNED, "a plan takes %llu bytes from one",
				 (unsigned long long)targets[i].nbytes);
		sum += targets[i].nbytes;
	}
	if (err && err != -ENODEV)
		complain(PLANNED, "PLAN: %d", err);
	if (sum > nbytes + 4096)
		complain(PLANNED, "a plan of %llu bytes takes %llu", (unsigned long long)nbytes,
			 (unsigned long long)sum);
}

/* Add and remove a group. Nothing is charged, since the neighbour needs room. */
static void churn(u64 *random)
{
	char path[32];
	struct ggroup_id id;

	snprintf(path, sizeof(path), "/t/x%llu", (unsigned long long)below(random, 8));
	id.id = add_slice(control, root, loose[below(random, 2)], path);
	if (!id.id) {
		if (errno != EEXIST)
			complain(TREE, "ADD: %d", errno);
		return;
	}
	if (call(control, GGROUP_IOC_REMOVE, &id))
		complain(TREE, "REMOVE of an empty slice");
}

static int root_call(enum root_call what, u64 *random)
{
	u32 number = below(random, TENANTS);
	u64 id = shared->tenants[number].id, slice = loose[below(random, 2)];
	u64 any = below(random, 3) ? id : slice;
	u64 size = below(random, 3) ? below(random, OBSERVED_MOST) : 0;
	struct ggroup_move move = { .id = id, .parent = slice };
	struct ggroup_command command = { .id = any, .value = size, .timeout_ms = 20 };
	struct ggroup_note note = { .id = any, .event = GGROUP_EVENT_RECLAIM };
	struct ggroup_id remove = { .id = id };
	struct ggroup_reset reset = { .id = any, .what = below(random, 2) };
	struct ggroup_set set = {
		.id = any, .mask = below(random, 4) & (GGROUP_SET_HIGH | GGROUP_SET_LOW),
		.high = below(random, 3) ? size : GGROUP_MAX, .low = size,
	};
	struct ggroup_books books;

	switch (what) {
	case MOVE:
		/* Tenants in /t/tight stay there: elsewhere their memory could not be taken back. */
		if (get_books(control, id, &books) || books.parent == tight)
			return -ENODEV;
		return call(control, GGROUP_IOC_MOVE, &move);
	case REMOVE:
		return call(control, GGROUP_IOC_REMOVE, &remove);
	case SET:
		if (!below(random, 4))
			set = (struct ggroup_set) { .id = tight, .mask = GGROUP_SET_SWAP_MAX,
						    .swap_max = below(random, CAPACITY / 8) };
		return call(control, GGROUP_IOC_SET, &set);
	case RESET_PEAK:
		return call(control, GGROUP_IOC_RESET_PEAK, &reset);
	case OBSERVE:
		/* In /t/tight there may be no more than can be taken back, for the neighbour's sake. */
		if (get_books(control, id, &books) || books.parent == tight)
			size %= CAPACITY / 64;
		return amount(control, GGROUP_IOC_OBSERVE, id, size, 0);
	case NOTE:
		return call(control, GGROUP_IOC_NOTE, &note);
	case PRESS:
		return amount(control, GGROUP_IOC_PRESS, any, size, 0);
	case PLAN:
		check_plan(below(random, 2) ? root : any, size);
		return 0;
	case RECLAIM:
		return call(control, GGROUP_IOC_RECLAIM, &command);
	case LESS:
		return amount(control, GGROUP_IOC_UNCHARGE, id, any_size(random), 0);
	case OUT:
		return amount(control, GGROUP_IOC_SWAP_OUT, id, any_size(random), 1);
	case EXIT:
		end_tenant(number);
		remove_dead();
		start_tenant(number, random);
		return 0;
	default:
		churn(random);
		return 0;
	}
}

/* Check what holds of a group while all threads go on. */
static void look_at(u64 id)
{
	u64 lived_us = (now_ns() - born_ns) / 1000, people = arrived + TENANTS;
	struct ggroup_books books;

	if (get_books(control, id, &books))
		return;		/* it has gone */
	looked++;
	if (books.current_bytes > POSSIBLE * people || books.swap > POSSIBLE * people)
		complain(FIGURE, "group %llu: current %lld, swap %lld", (unsigned long long)id,
			 (long long)books.current_bytes, (long long)books.swap);
	if (books.peak < books.current_bytes || books.peak > POSSIBLE * people)
		complain(FIGURE, "group %llu: peak %lld, current %lld", (unsigned long long)id,
			 (long long)books.peak, (long long)books.current_bytes);
	if (books.swap_peak < books.swap || books.peak_ever < books.peak ||
	    books.swap_peak_ever < books.swap_peak || books.peak_ever > POSSIBLE * people)
		complain(FIGURE, "group %llu: swap_peak %lld, swap %lld, ever %lld and %lld",
			 (unsigned long long)id, (long long)books.swap_peak, (long long)books.swap,
			 (long long)books.peak_ever, (long long)books.swap_peak_ever);
	/* Root's own moves, as the provider's, report a microsecond each. */
	if (books.move_usec > lived_us * people + books.swapouts)
		complain(MOVED, "group %llu: move_usec %llu after %llu us", (unsigned long long)id,
			 (unsigned long long)books.move_usec, (unsigned long long)lived_us);
	if (books.swapin_bytes > lived_us * 1000 * LINK_MOST * people)
		complain(MOVED, "group %llu: swapin_bytes %llu", (unsigned long long)id,
			 (unsigned long long)books.swapin_bytes);
}

static void look(void)
{
	struct ggroup_books books;

	look_at(root);
	look_at(top);
	look_at(loose[0]);
	look_at(loose[1]);
	look_at(tight);
	for (u32 i = 0; i < TENANTS; i++)
		look_at(shared->tenants[i].id);
	if (get_books(control, shared->neighbour_id, &books) || books.current_bytes > SHARE ||
	    books.swap || books.move_usec)
		complain(NEIGHBOURS, "the neighbour has %lld, and %lld in the host",
			 (long long)books.current_bytes, (long long)books.swap);
	if (get_books(control, friendly, &books) || books.current_bytes > SHARE || books.swap)
		complain(NEIGHBOURS, "the neighbour's slice has %lld", (long long)books.current_bytes);
}

static unsigned int count_files(pid_t pid)
{
	unsigned int files = 0;
	char path[32];
	DIR *folder;

	snprintf(path, sizeof(path), "/proc/%d/fd", pid);
	folder = opendir(path);
	if (!folder)
		return 0;
	while (readdir(folder))
		files++;
	closedir(folder);
	return files;
}

/* With all tenants stopped: check that each group holds what those below it do. */
static void compare(void)
{
	static struct ggroup_books books[GROUPS_MOST];

	list_groups();
	for (unsigned int i = 0; i < groups_count; i++)
		if (get_books(control, groups[i].id, &books[i]))
			complain(TREE, "a group went while nobody moved");
	for (unsigned int i = 0; i < groups_count; i++) {
		u64 held = 0, swapped = 0;

		if (groups[i].kind == GGROUP_KIND_PROCESS)
			continue;
		for (unsigned int j = 0; j < groups_count; j++) {
			held += books[j].parent == groups[i].id ? books[j].current_bytes : 0;
			swapped += books[j].parent == groups[i].id ? books[j].swap : 0;
		}
		if (held != books[i].current_bytes || swapped != books[i].swap)
			complain(SUM, "%s holds %lld and %lld in the host, those below %lld and %lld",
				 groups[i].path, (long long)books[i].current_bytes,
				 (long long)books[i].swap, (long long)held, (long long)swapped);
	}
	quiet++;
}

/*
 * Stop a tenant, and wait until it stands still, or has ended. The signal is repeated: a stop that has begun is
 * forgotten if one of the threads execs at that moment (zap_other_threads() in kernel/signal.c).
 */
static void stop(const struct tenant *tenant)
{
	siginfo_t info = { .si_pid = 0 };

	for (;;) {
		kill(tenant->pid, SIGSTOP);
		if (waitid(P_PID, tenant->pid, &info, WSTOPPED | WEXITED | WNOWAIT | WNOHANG) || info.si_pid)
			return;
		usleep(1000);
	}
}

static void stop_all(void)
{
	pthread_mutex_lock(&serving);
	for (u32 i = 0; i < TENANTS; i++)
		stop(&shared->tenants[i]);
	shared->pause = true;
	while (!__atomic_load_n(&shared->paused, __ATOMIC_ACQUIRE))
		usleep(200);
}

static void go_on(void)
{
	shared->pause = false;
	for (u32 i = 0; i < TENANTS; i++)
		kill(shared->tenants[i].pid, SIGCONT);
	pthread_mutex_unlock(&serving);
}

static void check_quiet(void)
{
	static unsigned int ours;

	stop_all();
	compare();
	for (u32 i = 0; i < TENANTS; i++)
		if (count_files(shared->tenants[i].pid) > FILES_MOST)
			complain(FILES, "a tenant has %u descriptors", count_files(shared->tenants[i].pid));
	ours = ours ?: count_files(getpid());
	if (count_files(getpid()) != ours)
		complain(FILES, "root has %u descriptors, not %u", count_files(getpid()), ours);
	go_on();
}

/* Restart tenants that ended by themselves. */
static void revive(u64 *random)
{
	for (u32 i = 0; i < TENANTS; i++) {
		pid_t pid = shared->tenants[i].pid;

		if (waitpid(pid, NULL, WNOHANG) != pid)
			continue;
		shared->tenants[i].pid = 0;
		remove_dead();
		start_tenant(i, random);
	}
}

static void empty(const struct tenant *tenant)
{
	struct ggroup_books books;

	if (get_books(control, tenant->id, &books))
		return;
	amount(control, GGROUP_IOC_OBSERVE, tenant->id, 0, 0);
	amount(control, GGROUP_IOC_UNCHARGE_SWAP, tenant->id, books.swap, 0);
}

/*
 * Choose two calls that change figures, of one size, mostly more than there is room for. They begin with nothing, since
 * a program that has charged all that it may is refused everything else at once.
 */
static void choose_duel(struct tenant *tenant, u64 *random)
{
	static const u64 sizes[] = {
		0, CAPACITY + 2 * MIB, CAPACITY + 4 * MIB, 4 * CAPACITY, 8 * CAPACITY,
	};

	if (!tenant->idle)
		empty(tenant);
	tenant->size = sizes[below(random, ARRAY_SIZE(sizes))];
	tenant->call[0] = below(random, 4) ? CHARGE : below(random, FIGURES);
	tenant->call[1] = below(random, 3) ? UNCHARGE : below(random, FIGURES);
}

/*
 * Choose a tenant whose charges are all refused: excess in /t/tight cannot go to the host. So whatever the other thread
 * takes was never granted. Return true where it has to be let out again.
 *
 * It is stopped while it is moved there, and has nothing: what it charged in between would be held on the GPU, and
 * could not be taken back for the neighbour.
 */
static bool corner(struct tenant *tenant, u64 *random)
{
	struct ggroup_move move = { .id = tenant->id, .parent = tight };
	struct ggroup_books books;
	bool there;

	if (get_books(control, tenant->id, &books))
		return false;
	there = books.parent == tight;
	if (!there) {
		int err;

		stop(tenant);
		empty(tenant);
		err = call(control, GGROUP_IOC_MOVE, &move);
		kill(tenant->pid, SIGCONT);
		if (err)
			return false;
	}
	tenant->size = CAPACITY + 2 * MIB * (1 + below(random, 4));
	tenant->call[0] = CHARGE;
	tenant->call[1] = below(random, 8) ? UNCHARGE : below(random, FIGURES);
	return !there;
}

static void let_out(const struct tenant *tenant, u64 *random)
{
	struct ggroup_move move = { .id = tenant->id, .parent = loose[below(random, 2)] };

	call(control, GGROUP_IOC_MOVE, &move);
}

/* Choose a pair that has not met yet, if there is one. */
static void choose(struct tenant *tenant, u64 *random)
{
	u32 *pair = tenant->call;

	tenant->size = 0;
	for (int tries = 0; tries < 200; tries++) {
		pair[0] = below(random, TENANT_CALLS);
		pair[1] = below(random, TENANT_CALLS);
		if (!met[pair[0]][pair[1]])
			return;
	}
}

/* Choose the call of root's that has met the fewest of the tenants' present calls. */
static enum root_call choose_root(u64 *random)
{
	enum root_call best = below(random, ROOT_CALLS), first = best;
	int most = 0;

	for (int i = 0; i < ROOT_CALLS; i++) {
		enum root_call other = (first + i) % ROOT_CALLS;
		int fresh = 0;

		for (u32 j = 0; j < 2 * TENANTS; j++)
			fresh += !met_root[shared->tenants[j / 2].call[j % 2]][other];
		if (fresh > most) {
			most = fresh;
			best = other;
		}
	}
	return best;
}

/* Return how often a tenant made a call, granted or refused. */
static u64 times(const struct tenant *tenant, u32 what)
{
	return __atomic_load_n(&tenant->done[what], __ATOMIC_RELAXED) +
	       __atomic_load_n(&tenant->refused[what], __ATOMIC_RELAXED);
}

/* Note which pairs met while root made @calls. */
static void note_met(u64 before[TENANTS][2], const enum root_call *whats, int calls)
{
	for (u32 i = 0; i < TENANTS; i++) {
		const struct tenant *tenant = &shared->tenants[i];
		const u32 *pair = tenant->call;
		bool did[2];

		for (int j = 0; j < 2; j++) {
			did[j] = times(tenant, pair[j]) > before[i][j];
			for (int k = 0; k < calls; k++)
				met_root[pair[j]][whats[k]] |= did[j];
		}
		met[pair[0]][pair[1]] |= did[0] && did[1];
		met[pair[1]][pair[0]] |= did[0] && did[1];
	}
}

static void one_step(u64 *random)
{
	enum root_call whats[CALLS_A_STEP];
	u64 until, before[TENANTS][2];
	/* Steps of a mode come in a row, since the neighbour's windows are longer than a step. */
	enum mode mode = is_spin(shared->step + 1) ? SPIN :
			 (shared->step + 1) / SPIN_STEPS % 2 ? DUEL : CROWD;
	u32 chosen = below(random, TENANTS);
	bool cornered = false;
	int calls = 0;

	for (u32 i = 0; i < TENANTS; i++) {
		struct tenant *tenant = &shared->tenants[i];

		/* Two threads that wait for a processor do not meet: so half of the steps belong to one tenant. */
		tenant->idle = i != chosen;
		if (mode == DUEL)
			choose_duel(tenant, random);
		else
			choose(tenant, random);
		for (int j = 0; j < 2; j++)
			before[i][j] = times(tenant, tenant->call[j]);
	}
	if (mode == DUEL && below(random, 4))
		cornered = corner(&shared->tenants[chosen], random);
	shared->mode = mode;
	__atomic_store_n(&shared->step, shared->step + 1, __ATOMIC_RELEASE);
	until = now_ns() + (shared->mode == SPIN ? SPIN_NS : STEP_NS);
	for (; mode != SPIN && calls < (mode == DUEL ? 1 : CALLS_A_STEP); calls++) {
		whats[calls] = choose_root(random);
		root_call(whats[calls], random);
		root_calls++;
		look();
	}
	if (mode == DUEL)
		until = now_ns() + DUEL_NS;
	while (now_ns() < until)
		usleep(10000);
	/* Before the next step, whose OBSERVE would mend what is wrong. */
	look();
	if (cornered)
		let_out(&shared->tenants[chosen], random);
	if (shared->mode == SPIN)
		return;
	note_met(before, whats, calls);
	revive(random);
	if (!(shared->step % QUIET_EVERY))
		check_quiet();
}

/* The end */

static int ascending(const void *a, const void *b)
{
	u64 one = *(const u64 *)a, other = *(const u64 *)b;

	return (one > other) - (one < other);
}

/* Return the median of the worst calls of all windows; and the worst of all. */
static double typical_worst_us(enum mode mode, double *worst)
{
	u64 *found = shared->worst_ns[mode], count = shared->windows[mode];

	qsort(found, count, sizeof(*found), ascending);
	*worst = count ? found[count - 1] / 1e3 : 0;
	return count ? found[count / 2] / 1e3 : 0;
}

static void finish(void)
{
	struct ggroup_books books;

	for (u32 i = 0; i < TENANTS; i++)
		end_tenant(i);
	remove_dead();
	shared->pause = true;
	while (!__atomic_load_n(&shared->paused, __ATOMIC_ACQUIRE))
		usleep(200);
	compare();
	end_process(shared->neighbour);
	remove_dead();
	if (get_books(control, root, &books) || books.current_bytes || books.swap)
		complain(SUM, "nobody is left, and the GPU holds %lld and %lld in the host",
			 (long long)books.current_bytes, (long long)books.swap);
}

static void build(pthread_t *server, int *stopper)
{
	struct ggroup_set set;
	int wake[2];

	control = open_device(0);
	provider.fd = open_device(O_NONBLOCK);
	provider.root = root = register_gpu(provider.fd, UUID, CAPACITY, 4096, 0);
	top = add_slice(control, root, root, "/t");
	loose[0] = add_slice(control, root, top, "/t/a");
	loose[1] = add_slice(control, root, top, "/t/b");
	tight = add_slice(control, root, top, "/t/tight");
	friendly = add_slice(control, root, root, "/n");
	set = (struct ggroup_set) { .id = tight, .mask = GGROUP_SET_HIGH | GGROUP_SET_SWAP_MAX,
				    .high = CAPACITY / 8, .swap_max = CAPACITY / 16 };
	if (!friendly || call(control, GGROUP_IOC_SET, &set))
		die("cannot build the tree");
	if (pipe2(wake, O_CLOEXEC))
		die("pipe");
	provider.stop = wake[0];
	*stopper = wake[1];
	pthread_create(server, NULL, serve_all, NULL);
}

/* Half of the pairs, and those that are hard to meet often: that takes longer on a busy machine. */
static bool enough_met(void)
{
	int pairs = 0, all = 0;
	u64 calls = 0;

	for (u32 i = 0; i < TENANTS; i++)
		calls += times(&shared->tenants[i], CHARGE) + times(&shared->tenants[i], UNCHARGE);
	if (calls < MET_CALLS)
		return false;

	for (int a = 0; a < TENANT_CALLS; a++) {
		for (int b = 0; b <= a; b++, all++)
			pairs += met[a][b];
		for (int b = 0; b < ROOT_CALLS; b++, all++)
			pairs += met_root[a][b];
	}
	return pairs >= all / 2 && shared->windows[SPIN] && shared->windows[CROWD];
}

static void report_pairs(void)
{
	unsigned int pairs = 0, of_root = 0;

	printf("\"never\": [");
	for (int a = 0; a < TENANT_CALLS; a++)
		for (int b = a; b < TENANT_CALLS; b++) {
			pairs += met[a][b];
			if (!met[a][b])
				printf("\"%s with %s\", ", tenant_names[a], tenant_names[b]);
		}
	for (int a = 0; a < TENANT_CALLS; a++)
		for (int b = 0; b < ROOT_CALLS; b++) {
			of_root += met_root[a][b];
			if (!met_root[a][b])
				printf("\"%s with %s\", ", tenant_names[a], root_names[b]);
		}
	printf("\"\"], \"pairs\": %u, \"pairs_with_root\": %u, ", pairs, of_root);
}

static void report(void)
{
	double worst[2], spinning = typical_worst_us(SPIN, &worst[0]);
	double attacked = typical_worst_us(CROWD, &worst[1]);
	u64 counts[TENANT_CALLS] = { 0 }, operations = root_calls, refused = 0;

	for (u32 i = 0; i < TENANTS; i++) {
		for (int j = 0; j < TENANT_CALLS; j++) {
			counts[j] += times(&shared->tenants[i], j);
			operations += times(&shared->tenants[i], j);
			refused += shared->tenants[i].refused[j];
		}
	}
	printf("{\"seed\": %llu, \"steps\": %llu, \"operations\": %llu, \"refused\": %llu, ",
	       (unsigned long long)shared->seed, (unsigned long long)shared->step,
	       (unsigned long long)operations, (unsigned long long)refused);
	printf("\"wrong\": {");
	for (int i = 0; i < KINDS; i++)
		printf("\"%s\": %d%s", kind_names[i], wrong[i], i < KINDS - 1 ? ", " : "}, ");
	printf("\"killed\": %llu, \"execed\": %llu, \"forked\": %llu, \"unshared\": %llu, "
	       "\"let_through\": %llu, ", (unsigned long long)killed,
	       (unsigned long long)counts[EXEC], (unsigned long long)counts[FORK],
	       (unsigned long long)counts[UNSHARE], (unsigned long long)shared->let_through);
	printf("\"looked\": %llu, \"quiet\": %llu, \"served\": %llu, ", (unsigned long long)looked,
	       (unsigned long long)quiet, (unsigned long long)provider.served);
	report_pairs();
	printf("\"neighbour_asked\": %llu, \"neighbour_percent\": %.4f, \"neighbour_errno\": %d, ",
	       (unsigned long long)shared->asked, 100.0 * shared->granted / shared->asked,
	       shared->neighbour_errno);
	printf("\"windows\": {\"spinning\": %llu, \"attacked\": %llu}, ",
	       (unsigned long long)shared->windows[SPIN], (unsigned long long)shared->windows[CROWD]);
	printf("\"worst_us\": {\"spinning\": %.0f, \"attacked\": %.0f}, "
	       "\"typical_worst_us\": {\"spinning\": %.0f, \"attacked\": %.0f}}\n",
	       worst[0], worst[1], spinning, attacked);
}

int main(int argc, char **argv)
{
	double seconds = argc > 1 ? atof(argv[1]) : 20;
	pthread_t server;
	u64 random;
	int stopper;

	signal(SIGPIPE, SIG_IGN);
	if (argc == 4 && !strcmp(argv[1], "tenant")) {
		/* A thread that execs loses what another has set. */
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (getppid() == 1)
			_exit(0);
		shared_fd = atoi(argv[3]);
		map_shared();
		run_tenant(atoi(argv[2]));
	}
	shared_fd = memfd_create("hostile", 0);
	if (shared_fd < 0 || ftruncate(shared_fd, sizeof(*shared)))
		die("memfd");
	map_shared();
	shared->seed = argc > 2 ? strtoull(argv[2], NULL, 0) : now_ns();
	fprintf(stderr, "seed %llu\n", (unsigned long long)shared->seed);
	groups = calloc(GROUPS_MOST, sizeof(*groups));
	random = seed_of(shared->seed, 0);
	born_ns = now_ns();
	build(&server, &stopper);
	start_neighbour();
	for (u32 i = 0; i < TENANTS; i++)
		start_tenant(i, &random);
	setpriority(PRIO_PROCESS, 0, -15);	/* for this thread, since the others are many */
	while (now_ns() - born_ns < seconds * 1e9 ||
	       (!enough_met() && now_ns() - born_ns < LONGER_MOST * seconds * 1e9))
		one_step(&random);
	finish();
	close(stopper);
	pthread_join(server, NULL);
	close(provider.fd);
	if (forget_gpu(control, UUID))
		complain(TREE, "cannot forget the GPU");
	report();
	for (int i = 0; i < KINDS; i++)
		if (wrong[i])
			return 1;
	return 0;
}
