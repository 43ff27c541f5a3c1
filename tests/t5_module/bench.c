// SPDX-License-Identifier: GPL-2.0
/*
 * bench [ROUNDS]: the cost of a tenant's calls, as multiples of getpid(), three levels deep.
 *
 * Rounds of a call and of getpid() take turns, and the median of the ratios counts, so that neither the machine nor
 * other programs on it matter.
 */

#include "program.h"

#define CALLS	250	/* in a round of each, which is shorter than a busy host's preemptions */
#define THREADS	2
#define UUID	"GPU-bench"

struct bench {
	int fd;		/* joined */
	int control;
	u64 id;
};

struct pair {
	pthread_barrier_t *barrier;
	const struct bench *bench;
	void (*round)(const struct bench *bench);
};

static void must(int err)
{
	if (err) {
		errno = -err;
		die("a call failed");
	}
}

static void round_getpid(const struct bench *bench)
{
	(void)bench;
	for (int i = 0; i < CALLS; i++)
		syscall(SYS_getpid);
}

/* The floor: the cost of any two ioctls that do nothing. */
static void round_nothing(const struct bench *bench)
{
	for (int i = 0; i < 2 * CALLS; i++)
		if (call(bench->fd, _IO(GGROUP_IOC_MAGIC, 255), NULL) != -ENOTTY)
			die("there is an ioctl 255");
}

static void charge_and_uncharge(int fd, u64 id)
{
	struct ggroup_amount amount = { .id = id, .nbytes = 4096 };

	for (int i = 0; i < CALLS; i++) {
		must(call(fd, GGROUP_IOC_CHARGE, &amount));
		must(call(fd, GGROUP_IOC_UNCHARGE, &amount));
	}
}

static void round_tenant(const struct bench *bench)
{
	charge_and_uncharge(bench->fd, 0);
}

static void round_control(const struct bench *bench)
{
	charge_and_uncharge(bench->control, bench->id);
}

static void round_get(const struct bench *bench)
{
	struct ggroup_books books = { .id = 0 };

	for (int i = 0; i < CALLS; i++) {
		books.id = 0;
		must(call(bench->fd, GGROUP_IOC_GET, &books));
	}
}

static void round_swap(const struct bench *bench)
{
	struct ggroup_amount amount = { .nbytes = 4096 };

	must(call(bench->fd, GGROUP_IOC_CHARGE, &amount));
	for (int i = 0; i < CALLS; i++) {
		must(call(bench->fd, GGROUP_IOC_SWAP_OUT, &amount));
		must(call(bench->fd, GGROUP_IOC_SWAP_IN, &amount));
	}
	must(call(bench->fd, GGROUP_IOC_UNCHARGE, &amount));
}

static u64 timed(void (*round)(const struct bench *), const struct bench *bench)
{
	u64 begun = now_ns();

	round(bench);
	return now_ns() - begun;
}

static void *in_thread(void *data)
{
	struct pair *pair = data;

	pthread_barrier_wait(pair->barrier);
	pair->round(pair->bench);
	pthread_barrier_wait(pair->barrier);
	return NULL;
}

/* The same in several threads at once: return the time until the last one is done. */
static u64 timed_together(void (*round)(const struct bench *), const struct bench *bench)
{
	pthread_barrier_t barrier;
	struct pair pair = { &barrier, bench, round };
	pthread_t threads[THREADS];
	u64 begun;

	pthread_barrier_init(&barrier, NULL, THREADS + 1);
	for (int i = 0; i < THREADS; i++)
		pthread_create(&threads[i], NULL, in_thread, &pair);
	pthread_barrier_wait(&barrier);
	begun = now_ns();
	pthread_barrier_wait(&barrier);
	begun = now_ns() - begun;
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	pthread_barrier_destroy(&barrier);
	return begun;
}

static int ascending(const void *a, const void *b)
{
	double one = *(const double *)a, other = *(const double *)b;

	return (one > other) - (one < other);
}

static double ratio(void (*round)(const struct bench *), const struct bench *bench, int rounds,
		    u64 (*measure)(void (*)(const struct bench *), const struct bench *))
{
	double *ratios = calloc(rounds, sizeof(*ratios)), median;

	measure(round, bench);	/* warm up */
	for (int i = 0; i < rounds; i++) {
		double base = measure(round_getpid, bench);

		ratios[i] = measure(round, bench) / base;
	}
	qsort(ratios, rounds, sizeof(*ratios), ascending);
	median = ratios[rounds / 2];
	free(ratios);
	return median;
}

int main(int argc, char **argv)
{
	int rounds = argc > 1 ? atoi(argv[1]) : 101;
	struct provider provider = { .fd = open_device(O_NONBLOCK) };
	struct bench bench = { .fd = open_device(0), .control = open_device(0) };
	pthread_t server;
	int wake[2];

	if (pipe2(wake, O_CLOEXEC))
		die("pipe");
	provider.stop = wake[0];
	provider.root = register_gpu(provider.fd, UUID, 1ULL << 40, 4096, 0);
	provider.parent = add_slice(provider.fd, provider.root, provider.root, "/bench");
	if (!provider.parent)
		die("cannot add a slice");
	pthread_create(&server, NULL, serve, &provider);
	must(join(bench.fd, UUID, 0, &bench.id));
	close(wake[1]);
	pthread_join(server, NULL);

	printf("{\"getpid_ns\": %.0f, ", (double)timed(round_getpid, &bench) / CALLS);
	printf("\"nothing\": %.2f, ", ratio(round_nothing, &bench, rounds, timed));
	printf("\"tenant\": %.2f, ", ratio(round_tenant, &bench, rounds, timed));
	printf("\"control\": %.2f, ", ratio(round_control, &bench, rounds, timed));
	printf("\"get\": %.2f, ", ratio(round_get, &bench, rounds, timed));
	printf("\"swap\": %.2f, ", ratio(round_swap, &bench, rounds, timed));
	printf("\"tenant_%d_threads\": %.2f}\n", THREADS,
	       ratio(round_tenant, &bench, rounds, timed_together));
	must(amount(bench.fd, GGROUP_IOC_UNCHARGE, 0, 0, 0));
	close(provider.fd);
	must(forget_gpu(bench.control, UUID));
	return 0;
}
