/* SPDX-License-Identifier: Apache-2.0 */
/* LINK_LIBRARY: burst_all CASE: busy periods from the inside; the library is part of this program. */
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "common.h"
#include "burst.h"
#include "counters.h"
#include "device.h"
#include "driver.h"
#include "gate.h"
#include "hold.h"
#include "library.h"
#include "stream.h"
#include "totals.h"
#include "turn.h"

#define LONG_US 60000000
#define AHEAD_US 1000

static CUcontext context;
static struct device *device;
static uint64_t ran;		/* atomically */
static bool release;		/* atomically */

KERNEL(counts, sizeof(int))
{
	(void)parameters;
	__atomic_add_fetch(&ran, 1, __ATOMIC_SEQ_CST);
}

KERNEL(waits, sizeof(int))
{
	(void)parameters;
	while (!__atomic_load_n(&release, __ATOMIC_ACQUIRE))
		usleep(100);
	__atomic_add_fetch(&ran, 1, __ATOMIC_SEQ_CST);
}

static int zero;
static void *parameters[] = { &zero };
static CUfunction counting;

static void launch(CUstream stream)
{
	DO(cuLaunchKernel(counting, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
}

static CUstream stream_new(void)
{
	CUstream stream;

	DO(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	return stream;
}

static uint64_t nanoseconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* The daemon's end of a page, made as backend/cuda/burst.py makes it. */
struct shared {
	struct burst_page *page;
	int fd;
};

static struct shared share(int seals)
{
	struct shared shared = { .fd = memfd_create("burst", MFD_ALLOW_SEALING) };

	CHECK(shared.fd >= 0 && !ftruncate(shared.fd, 4096) && !fcntl(shared.fd, F_ADD_SEALS, seals));
	shared.page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, shared.fd, 0);
	CHECK(shared.page != MAP_FAILED);
	return shared;
}

static void say(const struct shared *shared, uint64_t until)
{
	__atomic_store_n(&shared->page->until, until, __ATOMIC_RELEASE);
	syscall(SYS_futex, &shared->page->until, FUTEX_WAKE, 1000, NULL, NULL, 0);
}

static void follow(const struct shared *shared, unsigned int slot)
{
	CHECK(burst_follow(device, slot, shared->fd));
	turn_yield(device, AHEAD_US);
}

/* A program that goes before this one; publishes that it is busy while `busy` is set. */
struct leader {
	pthread_t thread;
	struct shared shared;
	bool busy, stop;	/* atomically */
};

static void *lead(void *argument)
{
	struct leader *leader = argument;

	while (!__atomic_load_n(&leader->stop, __ATOMIC_ACQUIRE)) {
		if (__atomic_load_n(&leader->busy, __ATOMIC_ACQUIRE))
			__atomic_store_n(&leader->shared.page->until, nanoseconds() + HOLD_WORD_NS_MOST,
					 __ATOMIC_RELEASE);
		usleep(200);
	}
	return NULL;
}

static void begin_leader(struct leader *leader)
{
	*leader = (struct leader){ .shared = share(F_SEAL_SHRINK), .busy = true };
	CHECK(!pthread_create(&leader->thread, NULL, lead, leader));
}

static void end_leader(struct leader *leader)
{
	__atomic_store_n(&leader->stop, true, __ATOMIC_RELEASE);
	CHECK(!pthread_join(leader->thread, NULL));
	say(&leader->shared, 0);
}

/* A launch in a thread of its own. */
struct doing {
	pthread_t thread;
	CUstream stream;
	bool done;		/* atomically */
};

static void *launches(void *argument)
{
	struct doing *doing = argument;

	DO(cuCtxSetCurrent(context));
	launch(doing->stream);
	__atomic_store_n(&doing->done, true, __ATOMIC_SEQ_CST);
	return NULL;
}

static bool is_done(const struct doing *doing)
{
	return __atomic_load_n(&doing->done, __ATOMIC_SEQ_CST);
}

static void begin_doing(struct doing *doing)
{
	doing->done = false;
	CHECK(!pthread_create(&doing->thread, NULL, launches, doing));
}

static void end_doing(struct doing *doing)
{
	CHECK(!pthread_join(doing->thread, NULL));
	CHECK(is_done(doing));
}

/* Begins a launch that is held. If it got through because the leader was late, or the row was over, tries again. */
static void begin_held(struct doing *doing)
{
	const uint64_t until = microseconds() + LONG_US;

	for (;;) {
		begin_doing(doing);
		while (!burst_waiting(device->ordinal) && !is_done(doing))
			usleep(50);
		if (!is_done(doing))
			return;
		end_doing(doing);
		CHECK(microseconds() < until);
	}
}

/* The cases of a program that goes behind others */

static void held(void)
{
	struct doing doing = { .stream = stream_new() };
	struct leader leader;
	CUdeviceptr address;

	DO(cuMemAlloc_v2(&address, 4096));
	begin_leader(&leader);
	CHECK(!turn_any);
	follow(&leader.shared, 3);
	CHECK(turn_any);
	begin_held(&doing);
	CHECK(turn_waiting(device));
	/* Work other than kernels passes: it has engines of its own, or takes hardly any time. */
	DO(cuMemsetD8Async(address, 1, 8, NULL));
	DO(cuStreamSynchronize(NULL));
	/* Memory can move meanwhile. */
	CHECK(gate_close(LONG_US / 1000));
	gate_open();
	end_leader(&leader);
	end_doing(&doing);
	CHECK(!burst_waiting(device->ordinal) && !burst_holds(device->ordinal));
	/* A program that it no longer goes behind does not hold it. */
	say(&leader.shared, nanoseconds() + HOLD_WORD_NS_MOST);
	CHECK(!burst_follow(device, 3, -1));
	turn_yield(device, 0);
	CHECK(!turn_any && !burst_holds(device->ordinal));
}

/* The time until which another program may have had the engine follows from the words of those that it goes behind
 * now. */
static void since(void)
{
	struct shared first = share(F_SEAL_SHRINK), second = share(F_SEAL_SHRINK);
	const uint64_t now_us = microseconds(), passed = (now_us - 1000) * HOLD_NS_A_US;

	CHECK(!burst_held_until(device->ordinal));
	follow(&first, 0);
	follow(&second, 5);
	CHECK(!burst_held_until(device->ordinal));
	say(&second, passed);
	CHECK(burst_held_until(device->ordinal) == now_us - 1000);
	say(&first, passed - 1);
	CHECK(burst_held_until(device->ordinal) == now_us - 1000);
	say(&first, passed + 1);
	CHECK(burst_held_until(device->ordinal) == now_us - 999);
	/* A false word. */
	say(&second, nanoseconds() + LONG_US * HOLD_NS_A_US);
	CHECK(burst_held_until(device->ordinal) == now_us - 999);
	burst_follow(device, 0, -1);
	CHECK(!burst_held_until(device->ordinal));
}

/* A program that died holds this one until the time it published last; a false word does not hold it at all. */
static void expires(void)
{
	struct shared shared = share(F_SEAL_SHRINK);
	uint64_t before;

	CHECK(!prctl(PR_SET_TIMERSLACK, 60000UL));
	follow(&shared, 0);
	before = nanoseconds();
	say(&shared, before + HOLD_WORD_NS_MOST - 1000000);
	launch(NULL);
	CHECK(nanoseconds() >= before + HOLD_WORD_NS_MOST - 1000000);
	/* The thread belongs to the program, and gets its own slack back. */
	CHECK(prctl(PR_GET_TIMERSLACK) == 60000);
	say(&shared, nanoseconds() + 3600 * UINT64_C(1000000000));
	CHECK(!burst_holds(device->ordinal));
	launch(NULL);
	say(&shared, UINT64_MAX);
	CHECK(!burst_holds(device->ordinal));
	launch(NULL);
	DO(cuStreamSynchronize(NULL));
	CHECK(ran == 3);
}

/* The longest hold counts, and each leader counts by itself. */
static void several(void)
{
	struct shared shared[BURST_LEADERS];

	for (unsigned int i = 0; i < BURST_LEADERS; i++) {
		shared[i] = share(F_SEAL_SHRINK);
		follow(&shared[i], i);
	}
	for (unsigned int i = 0; i < BURST_LEADERS; i++) {
		uint64_t until = nanoseconds() + 3000000;

		say(&shared[i], until);
		launch(NULL);
		CHECK(nanoseconds() >= until);
	}
	DO(cuStreamSynchronize(NULL));
	burst_end(device);
	say(&shared[0], nanoseconds() + HOLD_WORD_NS_MOST);
	CHECK(!burst_holds(device->ordinal));
}

/* However long others are busy, a launch gets through in each row. */
static void starves_not(void)
{
	struct leader leader;
	uint64_t before;

	begin_leader(&leader);
	follow(&leader.shared, 0);
	for (int i = 0; i < 5; i++) {
		before = microseconds();
		launch(NULL);
		CHECK(microseconds() - before < LONG_US);
	}
	DO(cuStreamSynchronize(NULL));
	CHECK(ran == 5);
	end_leader(&leader);
}

/* A page that could be truncated is refused. */
static void sealed(void)
{
	struct shared shared = share(F_SEAL_GROW);

	CHECK(!burst_follow(device, 0, shared.fd));
	CHECK(!burst_lead(device, shared.fd, 200));
	CHECK(!burst_leading);
	CHECK(!ftruncate(shared.fd, 0));
	launch(NULL);
	CHECK(!burst_holds(device->ordinal));
}

/* Captured work runs later, and its capture has to end. */
static void captures(void)
{
	CUstream stream = stream_new();
	struct leader leader;
	CUgraph graph;

	begin_leader(&leader);
	follow(&leader.shared, 0);
	DO(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
	for (int i = 0; i < 500; i++)
		launch(stream);
	DO(cuStreamEndCapture(stream, &graph));
	CHECK(!burst_waiting(device->ordinal));
	end_leader(&leader);
}

/* The end of a turn takes precedence; a held launch then waits for the next turn. */
static void turns(void)
{
	struct doing doing = { .stream = stream_new() };
	struct leader leader;
	bool drained = false;

	begin_leader(&leader);
	follow(&leader.shared, 0);
	begin_held(&doing);
	while (!drained)
		CHECK(!turn_end(device, 100000, &drained));
	__atomic_store_n(&leader.busy, false, __ATOMIC_RELEASE);
	say(&leader.shared, 0);
	while (burst_waiting(device->ordinal))
		usleep(50);
	/* It had not passed the gate before that closed, or it has finished. */
	CHECK(is_done(&doing) || turn_waiting(device) || !turn_end(device, 0, &drained));
	turn_begin(device, 0);
	end_doing(&doing);
	end_leader(&leader);
}

/* In a child there is no daemon to speak to, and the parent's words are not the child's. */
static void in_fork(void)
{
	struct shared shared = share(F_SEAL_SHRINK), own = share(F_SEAL_SHRINK);
	pid_t child;
	int status;

	follow(&shared, 0);
	CHECK(burst_lead(device, own.fd, 200));
	say(&shared, nanoseconds() + HOLD_WORD_NS_MOST);
	say(&own, 1);
	child = fork();
	if (!child) {
		CHECK(!turn_any && !burst_leading && !burst_holds(0));
		burst_begin(device);
		_exit(own.page->until != 1);
	}
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && !WEXITSTATUS(status));
}

/* Launches in threads while pages come and go, and others are busy or not. */
static void *hammers(void *argument)
{
	CUstream stream = stream_new();
	bool *stop = argument;

	while (!__atomic_load_n(stop, __ATOMIC_ACQUIRE)) {
		launch(stream);
		DO(cuStreamSynchronize(stream));
	}
	return NULL;
}

static void *hammers_in(void *argument)
{
	DO(cuCtxSetCurrent(context));
	return hammers(argument);
}

static void hammer(void)
{
	struct shared shared[2] = { share(F_SEAL_SHRINK), share(F_SEAL_SHRINK) }, own = share(F_SEAL_SHRINK);
	pthread_t threads[3];
	bool stop = false;

	for (int i = 0; i < 3; i++)
		CHECK(!pthread_create(&threads[i], NULL, hammers_in, &stop));
	for (int round = 0; round < 300; round++) {
		follow(&shared[round % 2], (unsigned int)round % 3);
		CHECK(burst_lead(device, own.fd, 200));
		if (round % 3 == 0) {
			say(&shared[0], nanoseconds() + 500000);
			say(&shared[1], nanoseconds() + 300000);
		}
		burst_tick();
		usleep(300);
		burst_tick();
		if (round % 4 == 0) {
			burst_end(device);
			turn_yield(device, 0);
		}
	}
	__atomic_store_n(&stop, true, __ATOMIC_RELEASE);
	for (int i = 0; i < 3; i++)
		CHECK(!pthread_join(threads[i], NULL));
	CHECK(ran > 30);
}

/* Run-ahead: what waits behind the running kernel takes no longer than the bound, and the GPU always has some work. */
static void ahead(void)
{
	const uint64_t us = (uint64_t)atoi(getenv("FAKE_KERNEL_US"));
	struct shared shared = share(F_SEAL_SHRINK);
	uint64_t most = 0, dry = 0, begun = microseconds(), most_launched = 0;

	CHECK(burst_follow(device, 0, shared.fd));
	turn_yield(device, us * 4);
	for (uint64_t i = 1; i <= 60; i++) {
		uint64_t pending;

		dry += i > 20 && i - 1 == __atomic_load_n(&ran, __ATOMIC_SEQ_CST);
		launch(NULL);
		pending = i - __atomic_load_n(&ran, __ATOMIC_SEQ_CST);
		most = pending > most ? pending : most;
		most_launched = i;
	}
	CHECK(microseconds() - begun >= us * 30);
	DO(cuStreamSynchronize(NULL));
	CHECK(ran == most_launched);
	printf("most %llu dry %llu\n", (unsigned long long)most, (unsigned long long)dry);
}

/* The cases of a program that goes before others */

static uint64_t word(const struct shared *shared)
{
	return __atomic_load_n(&shared->page->until, __ATOMIC_ACQUIRE);
}

static CUresult (*real_launch)(CUfunction, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,
			       unsigned int, unsigned int, CUstream, void **, void **);
static const struct shared *watched;
static uint64_t word_at_launch, launched_at;

static CUresult spies(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
		      unsigned int bz, unsigned int bytes, CUstream stream, void **values, void **extra)
{
	launched_at = nanoseconds();
	word_at_launch = word(watched);
	return real_launch(f, gx, gy, gz, bx, by, bz, bytes, stream, values, extra);
}

static unsigned int woken;	/* atomically */

static void wakes(void)
{
	__atomic_add_fetch(&woken, 1, __ATOMIC_SEQ_CST);
}

/* Work that runs when others come to go behind it is a busy period, though no launch begins it. */
static void began_before(void)
{
	struct shared own = share(F_SEAL_SHRINK);
	CUstream stream = stream_new();

	__atomic_store_n(&counters_wake, wakes, __ATOMIC_RELEASE);
	DO(cuLaunchKernel(function("waits"), 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
	CHECK(burst_lead(device, own.fd, 300));
	CHECK(!word(&own) && !own.page->periods);
	for (int i = 0; i < 3; i++) {
		CHECK(burst_tick());
		CHECK(word(&own) && own.page->periods == 1);
	}
	__atomic_store_n(&release, true, __ATOMIC_RELEASE);
	DO(cuStreamSynchronize(stream));
	CHECK(own.page->periods == 1);
}

/* The word is published before the driver is called, while work is pending, and for so long after it. */
static void leads(void)
{
	struct shared own = share(F_SEAL_SHRINK);
	CUstream stream = stream_new();
	const uint64_t after_ns = 300000;
	uint64_t before, ended, periods;

	__atomic_store_n(&counters_wake, wakes, __ATOMIC_RELEASE);	/* otherwise nothing would count as pending */
	burst_wake = wakes;
	watched = &own;
	real_launch = real.cuLaunchKernel;
	real.cuLaunchKernel = spies;
	launch(stream);
	CHECK(!word_at_launch && !word(&own));
	CHECK(burst_lead(device, own.fd, after_ns / 1000));
	CHECK(burst_leading == 1);
	while (burst_tick())
		usleep(100);
	before = word(&own);
	periods = own.page->periods;
	woken = 0;
	DO(cuLaunchKernel(function("waits"), 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL));
	CHECK(word_at_launch > launched_at && word_at_launch > before && word_at_launch <= launched_at + HOLD_LEASE_NS);
	CHECK(woken && own.page->periods == periods + 1);
	for (int i = 0; i < 20; i++) {
		before = nanoseconds();
		CHECK(burst_tick());
		CHECK(word(&own) >= before + HOLD_LEASE_NS);
	}
	__atomic_store_n(&release, true, __ATOMIC_RELEASE);
	DO(cuStreamSynchronize(stream));
	/* The thread that waited for the work knows that it has ended. */
	CHECK(word(&own) <= nanoseconds() + after_ns);
	/* Ticks go on until none is held any more, so that the next request of a burst wakes no thread, and publish
	 * nothing. */
	before = word(&own);
	woken = 0;
	while (burst_tick())
		usleep(50);
	CHECK(own.page->periods == periods + 1);
	CHECK(nanoseconds() >= before && word(&own) == before && !woken);
	/* Otherwise the end is published at the next tick. */
	launch(stream);
	CHECK(woken == 1 && own.page->periods == periods + 2);
	while (burst_tick())
		usleep(100);
	ended = nanoseconds();
	CHECK(word(&own) <= ended + after_ns);
	/* After the end nothing more is published. */
	before = word(&own);
	CHECK(!burst_tick() && word(&own) == before);
	do {
		launch(stream);
		DO(cuStreamSynchronize(stream));
	} while (!burst_tick());
	woken = 0;
	launch(stream);
	CHECK(!woken);
	/* No program goes behind it any more. */
	CHECK(burst_lead(device, -1, 0) && !burst_leading && word(&own) == 0);
	launch(stream);
	CHECK(word(&own) == 0);
	/* Again, with another page. */
	own = share(F_SEAL_SHRINK);
	CHECK(burst_lead(device, own.fd, 200));
	launch(stream);
	CHECK(word(&own));
	DO(cuStreamSynchronize(stream));
}

/* A graph counts as a request; captured launches do not. */
static void graphs(void)
{
	struct shared own = share(F_SEAL_SHRINK);
	CUstream stream = stream_new();
	CUgraphExec exec;
	CUgraph graph;

	CHECK(burst_lead(device, own.fd, 200));
	while (burst_tick())
		usleep(100);
	say(&own, 1);
	DO(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
	launch(stream);
	DO(cuStreamEndCapture(stream, &graph));
	CHECK(word(&own) == 1);
	DO(cuGraphInstantiateWithFlags(&exec, graph, 0));
	CHECK(word(&own) == 1);
	DO(cuGraphLaunch(exec, stream));
	CHECK(word(&own) > 1);
	DO(cuStreamSynchronize(stream));
}

int main(int count, char **arguments)
{
	static const struct {
		const char *name;
		void (*run)(void);
	} cases[] = {
		{ "held", held }, { "expires", expires }, { "several", several }, { "starves_not", starves_not },
		{ "sealed", sealed }, { "captures", captures }, { "turns", turns }, { "fork", in_fork },
		{ "hammer", hammer }, { "ahead", ahead },
		{ "since", since }, { "began_before", began_before }, { "leads", leads }, { "graphs", graphs },
	};

	CHECK(count == 2);
	context = start(0);
	library_begin();
	counting = function("counts");
	device = device_current();
	CHECK(device);
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		if (!strcmp(cases[i].name, arguments[1])) {
			cases[i].run();
			return 0;
		}
	}
	return 2;
}
