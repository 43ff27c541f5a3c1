// SPDX-License-Identifier: GPL-2.0
/*
 * stress SECONDS [SEED]: many threads charge, uncharge and swap, in a tree that others change under them, and each
 * keeps its own account of what succeeded. When all is quiet, the kernel's figures must be the sums of these, to the
 * byte, at every level; and 0 once everything is uncharged.
 *
 *	root
 *	  /a, /b		never moved: everything that ever swaps is below them
 *	    /a/0 /a/1 /b/0 /b/1	moved between /a and /b
 *	      the processes	moved between these four
 *	    transient slices with a transient process each
 */

#include "program.h"

#define WORKERS		64
#define PROCESSES	9	/* the last one is this process, by a file that joined */
#define OWN		(PROCESSES - 1)
#define SLICES		4
#define CHURNERS	2
#define MIB		(1ULL << 20)

enum { HELD, SWAPPED, SWAPIN_BYTES, SWAPOUT_BYTES, SWAPINS, SWAPOUTS, USEC, FIGURES };

static const char *const figures[FIGURES] = {
	"current", "swap", "swapin_bytes", "swapout_bytes", "swapins", "swapouts", "move_usec",
};

struct account {
	u64 figure[FIGURES];
};

struct counts {
	u64 charged, uncharged, swapped_out, swapped_in, refused, set, moved, churned, looked;
};

struct thread {
	pthread_t thread;
	u64 random;
	int fd;
	u64 id;
	unsigned int process;
	struct account account;
	struct counts counts;
	unsigned int failed;
};

static int control, tenant;
static u64 root, tops[2], slices[SLICES], groups[PROCESSES];
static volatile bool stop;

#define FAIL(thread, ...) do {							\
	if (!(thread)->failed++) {						\
		fprintf(stderr, __VA_ARGS__);					\
		fputc('\n', stderr);						\
	}									\
} while (0)

static void add_up(struct account *sum, const struct account *one)
{
	for (int i = 0; i < FIGURES; i++)
		sum->figure[i] += one->figure[i];
}

/* A program reports its own move: at least a byte, and in no time, since that is bounded. */
static bool is_move(const struct thread *thread, u64 nbytes, u64 *usec)
{
	if (thread->fd != tenant)
		return true;
	*usec = 0;
	return nbytes;
}

/* Do one random operation on a group, and enter it into the account. */
static void operate(struct thread *thread, u64 id)
{
	struct account *account = &thread->account;
	u64 *held = &account->figure[HELD], *swapped = &account->figure[SWAPPED];
	u64 nbytes, usec = below(&thread->random, 50);
	int err;

	switch (below(&thread->random, 8)) {
	case 0 ... 2:
		nbytes = below(&thread->random, 64) * 4096 + below(&thread->random, 3);
		err = amount(thread->fd, GGROUP_IOC_CHARGE, id, nbytes, 0);
		if (!err) {
			*held += nbytes;
			thread->counts.charged++;
		} else if (err == -ENOMEM) {
			thread->counts.refused++;
		} else {
			FAIL(thread, "charge: %d", err);
		}
		return;
	case 3 ... 4:
		nbytes = below(&thread->random, *held + 1);
		err = amount(thread->fd, GGROUP_IOC_UNCHARGE, id, nbytes, 0);
		if (err)
			FAIL(thread, "uncharge %llu of %llu: %d", (unsigned long long)nbytes,
			     (unsigned long long)*held, err);
		*held -= nbytes;
		thread->counts.uncharged++;
		return;
	case 5:
		nbytes = below(&thread->random, *held + 1);
		if (!is_move(thread, nbytes, &usec))
			return;
		err = amount(thread->fd, GGROUP_IOC_SWAP_OUT, id, nbytes, usec);
		if (err == -ENOSPC) {
			thread->counts.refused++;
			return;
		}
		if (err)
			FAIL(thread, "swap_out: %d", err);
		*held -= nbytes;
		*swapped += nbytes;
		account->figure[SWAPOUT_BYTES] += nbytes;
		account->figure[SWAPOUTS]++;
		account->figure[USEC] += usec;
		thread->counts.swapped_out++;
		return;
	case 6:
		nbytes = below(&thread->random, *swapped + 1);
		if (!is_move(thread, nbytes, &usec))
			return;
		err = amount(thread->fd, GGROUP_IOC_SWAP_IN, id, nbytes, usec);
		if (err == -EAGAIN) {
			thread->counts.refused++;
			return;
		}
		if (err)
			FAIL(thread, "swap_in: %d", err);
		*held += nbytes;
		*swapped -= nbytes;
		account->figure[SWAPIN_BYTES] += nbytes;
		account->figure[SWAPINS]++;
		account->figure[USEC] += usec;
		thread->counts.swapped_in++;
		return;
	default:
		nbytes = below(&thread->random, *swapped + 1);
		err = amount(thread->fd, GGROUP_IOC_UNCHARGE_SWAP, id, nbytes, 0);
		if (err)
			FAIL(thread, "uncharge_swap: %d", err);
		*swapped -= nbytes;
	}
}

static void *work(void *data)
{
	struct thread *thread = data;

	/* There are many of these, and the few threads that change the tree need processor time. */
	setpriority(PRIO_PROCESS, syscall(SYS_gettid), 10);
	while (!stop && !thread->failed)
		operate(thread, thread->id);
	return NULL;
}

static u64 any_below_root(u64 *random)
{
	switch (below(random, 3)) {
	case 0:
		return tops[below(random, 2)];
	case 1:
		return slices[below(random, SLICES)];
	default:
		return groups[below(random, PROCESSES)];
	}
}

static void *limit(void *data)
{
	struct thread *thread = data;

	while (!stop && !thread->failed) {
		u64 *random = &thread->random;
		struct ggroup_set set = {
			.id = any_below_root(random),
			.mask = below(random, 8),
			.high = below(random, 3) ? below(random, 64) * MIB : GGROUP_MAX,
			.low = below(random, 2) ? below(random, 16) * MIB : 0,
			.swap_max = below(random, 3) ? below(random, 32) * MIB : GGROUP_MAX,
		};
		int err = call(control, GGROUP_IOC_SET, &set);

		if (err)
			FAIL(thread, "set: %d", err);
		thread->counts.set++;
	}
	return NULL;
}

static void *shuffle(void *data)
{
	struct thread *thread = data;

	while (!stop && !thread->failed) {
		u64 *random = &thread->random;
		struct ggroup_move move;
		int err;

		if (below(random, 4))
			move = (struct ggroup_move) { groups[below(random, PROCESSES)],
						      slices[below(random, SLICES)] };
		else
			move = (struct ggroup_move) { slices[below(random, SLICES)],
						      tops[below(random, 2)] };
		err = call(control, GGROUP_IOC_MOVE, &move);
		if (err)
			FAIL(thread, "move: %d", err);
		thread->counts.moved++;
	}
	return NULL;
}

/* Make a slice and a process in it, which charge, swap and go with all that they hold. */
static void *churn(void *data)
{
	struct thread *thread = data;
	unsigned int number = 0;

	while (!stop && !thread->failed) {
		pid_t pid = fork_idle();
		struct ggroup_id slice = { 0 }, group = { 0 };
		char path[64];
		int err;

		snprintf(path, sizeof(path), "/transient/%u/%u", thread->process, number++);
		slice.id = add_slice(control, root, tops[below(&thread->random, 2)], path);
		if (slice.id)
			group.id = add_process(control, root, slice.id, pid, start_of(pid));
		if (!slice.id || !group.id) {
			FAIL(thread, "add: %d", errno);
			end_process(pid);
			break;
		}
		for (int i = 0; i < 20; i++)
			operate(thread, group.id);
		/* Dead or alive, announced or not: only REMOVE changes the books. */
		if (below(&thread->random, 2))
			end_process(pid), pid = 0;
		err = call(control, GGROUP_IOC_REMOVE, &slice);
		if (err != -EBUSY)
			FAIL(thread, "remove of a slice that is not empty: %d", err);
		err = call(control, GGROUP_IOC_REMOVE, &group) ?: call(control, GGROUP_IOC_REMOVE,
								       &slice);
		if (err)
			FAIL(thread, "remove: %d", err);
		if (pid)
			end_process(pid);
		thread->account.figure[HELD] = 0;
		thread->account.figure[SWAPPED] = 0;
		thread->counts.churned++;
	}
	return NULL;
}

static void *look(void *data)
{
	struct thread *thread = data;

	while (!stop && !thread->failed) {
		struct ggroup_target targets[64];
		struct ggroup_plan plan = {
			.id = below(&thread->random, 4) ? any_below_root(&thread->random) : root,
			.nbytes = below(&thread->random, 16) * MIB,
			.targets = (uintptr_t)targets,
			.capacity = ARRAY_SIZE(targets),
		};
		struct ggroup_group *next = calloc(1, sizeof(*next));
		struct ggroup_books books;
		u64 sum = 0, last = 0;
		int err = get_books(control, plan.id, &books);

		if (err || books.current_bytes > GGROUP_MAX || books.swap > GGROUP_MAX ||
		    books.peak < books.current_bytes)
			FAIL(thread, "get: %d, current %lld, swap %lld, peak %lld", err,
			     (long long)books.current_bytes, (long long)books.swap,
			     (long long)books.peak);
		err = call(control, GGROUP_IOC_PLAN, &plan);
		for (unsigned int i = 0; !err && i < plan.count; i++)
			sum += targets[i].nbytes;
		if (err || sum > plan.nbytes)
			FAIL(thread, "plan: %d, %llu bytes", err, (unsigned long long)sum);
		for (next->root = root; !(err = call(control, GGROUP_IOC_NEXT, next));
		     next->root = root) {
			if (next->id <= last || next->root != root)
				FAIL(thread, "next: %llu after %llu", (unsigned long long)next->id,
				     (unsigned long long)last);
			last = next->id;
		}
		if (err != -ENOENT)
			FAIL(thread, "next: %d", err);
		free(next);
		thread->counts.looked++;
	}
	return NULL;
}

/* The end */

static int compare(const char *name, u64 id, const struct account *expected, unsigned int count)
{
	struct ggroup_books books;
	int wrong = 0, err = get_books(control, id, &books);
	u64 found[FIGURES] = {
		[HELD] = books.current_bytes,
		[SWAPPED] = books.swap,
		[SWAPIN_BYTES] = books.swapin_bytes,
		[SWAPOUT_BYTES] = books.swapout_bytes,
		[SWAPINS] = books.swapins,
		[SWAPOUTS] = books.swapouts,
		[USEC] = books.move_usec,
	};

	if (err) {
		fprintf(stderr, "%s: %d\n", name, err);
		return 1;
	}
	for (unsigned int i = 0; i < count; i++) {
		if (found[i] == expected->figure[i])
			continue;
		fprintf(stderr, "%s: %s is %llu, not %llu\n", name, figures[i],
			(unsigned long long)found[i], (unsigned long long)expected->figure[i]);
		wrong++;
	}
	return wrong;
}

/* Sum up the kernel's figures of several groups. */
static void sum_of(const u64 *ids, unsigned int count, struct account *sum)
{
	struct ggroup_books books;

	memset(sum, 0, sizeof(*sum));
	for (unsigned int i = 0; i < count; i++) {
		get_books(control, ids[i], &books);
		add_up(sum, &(struct account) { {
			books.current_bytes, books.swap, books.swapin_bytes, books.swapout_bytes,
			books.swapins, books.swapouts, books.move_usec,
		} });
	}
}

static int same(const char *name, const struct account *found, const struct account *expected)
{
	int wrong = 0;

	for (int i = 0; i < FIGURES; i++) {
		if (found->figure[i] == expected->figure[i])
			continue;
		fprintf(stderr, "%s: %s is %llu, not %llu\n", name, figures[i],
			(unsigned long long)found->figure[i],
			(unsigned long long)expected->figure[i]);
		wrong++;
	}
	return wrong;
}

/* Check that a slice holds what its processes do, wherever they are by now. */
static int compare_slices(const struct account *processes)
{
	struct account expected[SLICES] = { 0 }, above[2] = { 0 };
	struct ggroup_books books;
	int wrong = 0;

	for (int p = 0; p < PROCESSES; p++) {
		get_books(control, groups[p], &books);
		for (int s = 0; s < SLICES; s++)
			if (books.parent == slices[s])
				add_up(&expected[s], &processes[p]);
	}
	for (int s = 0; s < SLICES; s++) {
		wrong += compare("a slice", slices[s], &expected[s], 2);
		get_books(control, slices[s], &books);
		add_up(&above[books.parent == tops[1]], &expected[s]);
	}
	for (int t = 0; t < 2; t++)
		wrong += compare("a top slice", tops[t], &above[t], 2);
	return wrong;
}

static int compare_all(const struct thread *workers, const struct thread *churners)
{
	struct account processes[PROCESSES] = { 0 }, lasting = { 0 }, all, sum;
	int wrong = 0;

	for (int i = 0; i < WORKERS; i++)
		add_up(&processes[workers[i].process], &workers[i].account);
	for (int p = 0; p < PROCESSES; p++) {
		wrong += compare("a process", groups[p], &processes[p], FIGURES);
		add_up(&lasting, &processes[p]);
	}
	wrong += compare_slices(processes);
	/* A moved process left its history behind, but all of that is at some slice. */
	sum_of(slices, SLICES, &sum);
	wrong += same("the slices", &sum, &lasting);
	all = lasting;
	for (int i = 0; i < CHURNERS; i++)
		add_up(&all, &churners[i].account);
	sum_of(tops, 2, &sum);
	wrong += same("the top slices", &sum, &all);
	return wrong + compare("the root", root, &all, FIGURES);
}

static int empty(struct thread *workers)
{
	static const struct account nothing;
	int wrong = 0;

	for (int i = 0; i < WORKERS; i++) {
		struct thread *worker = &workers[i];

		if (amount(worker->fd, GGROUP_IOC_UNCHARGE, worker->id,
			   worker->account.figure[HELD], 0) ||
		    amount(worker->fd, GGROUP_IOC_UNCHARGE_SWAP, worker->id,
			   worker->account.figure[SWAPPED], 0)) {
			fprintf(stderr, "cannot uncharge what is held\n");
			wrong++;
		}
	}
	for (int p = 0; p < PROCESSES; p++)
		wrong += compare("an empty process", groups[p], &nothing, 2);
	for (int s = 0; s < SLICES; s++)
		wrong += compare("an empty slice", slices[s], &nothing, 2);
	for (int t = 0; t < 2; t++)
		wrong += compare("an empty top slice", tops[t], &nothing, 2);
	return wrong + compare("the empty root", root, &nothing, 2);
}

static void build(struct provider *provider, pthread_t *server, int *stopper, pid_t *pids)
{
	static const char *const paths[SLICES] = { "/a/0", "/a/1", "/b/0", "/b/1" };
	int wake[2];

	control = open_device(0);
	tenant = open_device(0);
	provider->fd = open_device(O_NONBLOCK);
	provider->root = root = register_gpu(provider->fd, "GPU-stress", 512 * MIB, 4096, MIB);
	tops[0] = add_slice(control, root, root, "/a");
	tops[1] = add_slice(control, root, root, "/b");
	for (int i = 0; i < SLICES; i++)
		slices[i] = add_slice(control, root, tops[i / 2], paths[i]);
	for (int i = 0; i < OWN; i++) {
		pids[i] = fork_idle();
		groups[i] = add_process(control, root, slices[i % SLICES], pids[i],
					start_of(pids[i]));
		if (!groups[i])
			die("cannot add a process");
	}
	provider->parent = slices[0];
	if (pipe2(wake, O_CLOEXEC))
		die("pipe");
	provider->stop = wake[0];
	*stopper = wake[1];
	pthread_create(server, NULL, serve, provider);
	if (join(tenant, "GPU-stress", 0, &groups[OWN]))
		die("cannot join");
}

int main(int argc, char **argv)
{
	static struct thread workers[WORKERS], churners[CHURNERS], others[4];
	static void *(*const roles[])(void *) = { limit, shuffle, look, limit };
	double seconds = argc > 1 ? atof(argv[1]) : 5;
	u64 seed = argc > 2 ? strtoull(argv[2], NULL, 0) : now_ns();
	struct timespec left = { seconds, (seconds - (long)seconds) * 1e9 };
	struct provider provider = { 0 };
	struct counts sum = { 0 };
	pthread_t server;
	pid_t pids[OWN];
	int stopper, wrong = 0;

	signal(SIGPIPE, SIG_IGN);
	build(&provider, &server, &stopper, pids);
	for (int i = 0; i < WORKERS; i++) {
		struct thread *worker = &workers[i];

		worker->process = i % PROCESSES;
		worker->random = seed_of(seed, i);
		worker->fd = worker->process == OWN ? tenant : control;
		worker->id = worker->process == OWN ? 0 : groups[worker->process];
		pthread_create(&worker->thread, NULL, work, worker);
	}
	for (int i = 0; i < CHURNERS; i++) {
		churners[i].process = i;
		churners[i].fd = control;
		churners[i].random = seed_of(seed, 1000 + i);
		pthread_create(&churners[i].thread, NULL, churn, &churners[i]);
	}
	for (size_t i = 0; i < ARRAY_SIZE(others); i++) {
		others[i].random = seed_of(seed, 2000 + i);
		pthread_create(&others[i].thread, NULL, roles[i], &others[i]);
	}
	while (nanosleep(&left, &left) && errno == EINTR)
		;
	stop = true;

	struct { struct thread *threads; size_t count; } all[] = {
		{ workers, WORKERS }, { churners, CHURNERS }, { others, ARRAY_SIZE(others) },
	};
	for (size_t i = 0; i < ARRAY_SIZE(all); i++) {
		for (size_t j = 0; j < all[i].count; j++) {
			struct thread *thread = &all[i].threads[j];

			pthread_join(thread->thread, NULL);
			wrong += thread->failed;
			sum.charged += thread->counts.charged;
			sum.uncharged += thread->counts.uncharged;
			sum.swapped_out += thread->counts.swapped_out;
			sum.swapped_in += thread->counts.swapped_in;
			sum.refused += thread->counts.refused;
			sum.set += thread->counts.set;
			sum.moved += thread->counts.moved;
			sum.churned += thread->counts.churned;
			sum.looked += thread->counts.looked;
		}
	}
	wrong += compare_all(workers, churners);
	wrong += empty(workers);
	for (int i = 0; i < OWN; i++)
		end_process(pids[i]);
	close(stopper);
	pthread_join(server, NULL);
	close(provider.fd);
	if (forget_gpu(control, "GPU-stress")) {
		fprintf(stderr, "cannot forget the GPU\n");
		wrong++;
	}
	printf("{\"seed\": %llu, \"wrong\": %d, \"charged\": %llu, \"uncharged\": %llu, "
	       "\"swapped_out\": %llu, \"swapped_in\": %llu, \"refused\": %llu, \"set\": %llu, "
	       "\"moved\": %llu, \"churned\": %llu, \"looked\": %llu, \"served\": %llu}\n",
	       (unsigned long long)seed, wrong, (unsigned long long)sum.charged,
	       (unsigned long long)sum.uncharged, (unsigned long long)sum.swapped_out,
	       (unsigned long long)sum.swapped_in, (unsigned long long)sum.refused,
	       (unsigned long long)sum.set, (unsigned long long)sum.moved,
	       (unsigned long long)sum.churned, (unsigned long long)sum.looked,
	       (unsigned long long)provider.served);
	return wrong ? 1 : 0;
}
