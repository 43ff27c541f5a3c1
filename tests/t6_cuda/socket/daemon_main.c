/* SPDX-License-Identifier: Apache-2.0 */
/* With the library's end of the socket alone: does what a line of standard input says and prints one line.
 * Memory is a figure here. */
#include "bare.h"
#include "burst.h"
#include "calm.h"
#include "counters.h"
#include "daemon.h"
#include "departure.h"
#include "detour.h"
#include "exchange.h"
#include "home.h"
#include "lent.h"
#include "listener.h"
#include "log.h"
#include "keeper.h"
#include "mover.h"
#include "ours.h"
#include "piece.h"
#include "session.h"
#include "sight.h"
#include "totals.h"
#include "turn.h"
#include "workset.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

__thread unsigned int ours_depth;
void (*counters_wake)(void);

static struct device devices[2];
static struct totals_page *_Atomic counting;
static _Atomic uint64_t kernels;
static _Atomic unsigned int delay_ms, ticks;
static _Atomic uint64_t pooled;		/* freed by mover_out instead of being moved */
static _Atomic uint64_t to_book;	/* moved, and not in the books yet */
static _Atomic uint64_t moved_out, moved_in;
static _Atomic uint64_t set_bytes;	/* of the working set; 0: none is told */
static _Atomic uint64_t turn_us;	/* of the last END_TURN, or the run-ahead of the last BEGIN_TURN */
static _Atomic int turn;		/* -1: opened by the end of a connection; -2: by a departure; 1: over;
					 * 2: begun */
static _Atomic bool late;		/* it is over, and was not drained */
static _Atomic uint64_t granted;	/* of the host, at last, bytes */
static _Atomic unsigned int grants;
static _Atomic uint64_t groups;		/* of SMs that kernels run on; 0: all */
static _Atomic uint64_t marked;		/* at ends of turns, bytes */

void log_line(const char *format, ...)
{
	va_list arguments;

	if (!getenv("GGROUP_CUDA_LOG"))
		return;
	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fputc('\n', stderr);
}

static int number_of(int ordinal)
{
	return __atomic_load_n(&devices[ordinal].index, __ATOMIC_ACQUIRE);
}

static void count(struct totals_page *page)
{
	int index = number_of(0);

	if (page && index >= 0)
		__atomic_store_n(&page->gpu[index].submitted, kernels, __ATOMIC_RELEASE);
}

void totals_share(struct totals_page *page)
{
	counting = page;
	count(page);
}

CUresult green_shape(CUdevice ordinal, struct green_shape *shape)
{
	*shape = (struct green_shape){ 16, 8, 132 };
	return ordinal ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

uint64_t detour_mask(CUdevice ordinal)
{
	return ordinal ? 0 : groups;
}

int detour_limit(struct device *device, uint64_t mask)
{
	(void)device;
	groups = mask;
	return 0;
}

void detour_release(struct device *device)
{
	(void)device;
}

bool departure_begun(void)
{
	return false;
}

int departure_begin(bool near)
{
	(void)near;
	return EOPNOTSUPP;
}

void departure_end(void)
{
}

int turn_end(struct device *device, uint64_t timeout_us, bool *drained)
{
	turn_us = timeout_us;
	turn = 1;
	*drained = device->ordinal == 0 && timeout_us;
	late = !*drained && timeout_us != 77;
	return timeout_us == 77 ? EBUSY : 0;
}

void turn_begin(struct device *device, uint64_t run_ahead_us)
{
	(void)device;
	turn_us = run_ahead_us;
	turn = 2;
	late = false;
}

bool bare_end(void)
{
	return true;
}

bool turn_is_over(const struct device *device)
{
	(void)device;
	return turn == 1;
}

bool turn_is_late(const struct device *device)
{
	(void)device;
	return late;
}

void turn_open(struct device *device)
{
	(void)device;
	turn = -2;
	late = false;
}

void turn_open_all(void)
{
	turn = -1;
	late = false;
}

bool turn_watch(void)
{
	return false;
}

void calm_tick(struct device *device)
{
	(void)device;
}

bool calm_rests(const struct device *device)
{
	(void)device;
	return false;
}

void (*burst_wake)(void);

/* What it was told of busy periods: a page by its inode, 0 without one. */
static _Atomic uint64_t led_by, held_for_us, followed[BURST_LEADERS], yields_us;

static uint64_t inode(int fd)
{
	struct stat status;

	return fd >= 0 && !fstat(fd, &status) ? status.st_ino : 0;
}

bool burst_lead(struct device *device, int fd, uint64_t after_us)
{
	(void)device;
	led_by = inode(fd);
	held_for_us = after_us;
	return true;
}

bool burst_follow(struct device *device, unsigned int slot, int fd)
{
	bool any = false;

	(void)device;
	followed[slot] = inode(fd);
	for (unsigned int i = 0; i < BURST_LEADERS; i++)
		any |= followed[i] != 0;
	return any;
}

bool burst_tick(void)
{
	return false;
}

void burst_end(struct device *device)
{
	burst_lead(device, -1, 0);
	for (unsigned int i = 0; i < BURST_LEADERS; i++)
		burst_follow(device, i, -1);
}

void device_each(void (*visit)(struct device *, void *), void *argument)
{
	for (int i = 0; i < 2; i++)
		visit(&devices[i], argument);
}

void turn_yield(struct device *device, uint64_t run_ahead_us)
{
	(void)device;
	yields_us = run_ahead_us;
}

int64_t home_some(struct device *device)
{
	(void)device;
	return -1;
}

static uint64_t lent_look;	/* atomically: what is lent is found to be closed */

int64_t lent_tick(void)
{
	if (!__atomic_load_n(&devices[0].lent, __ATOMIC_RELAXED))
		return -1;
	if (__atomic_load_n(&lent_look, __ATOMIC_RELAXED)) {
		__atomic_store_n(&devices[0].lent, 0, __ATOMIC_RELAXED);
		daemon_report(&devices[0]);
	}
	return 10;
}

int counters_tick(void)
{
	ticks++;
	return -1;
}

uint64_t mover_out(struct device *device, uint64_t bytes, uint64_t *usec)
{
	uint64_t trim = at_most(pooled, bytes);

	usleep(delay_ms * 1000);
	if (trim) {
		pooled -= trim;
		__atomic_sub_fetch(&device->resident, trim, __ATOMIC_SEQ_CST);
		daemon_uncharge(device, trim, 0);
	}
	bytes = at_most(bytes - trim, __atomic_load_n(&device->resident, __ATOMIC_SEQ_CST));
	to_book += bytes;
	*usec = 1000;
	return bytes;
}

void keeper_grant(struct device *device, uint64_t bytes)
{
	(void)device;
	granted = bytes;
	grants++;
}

struct mover_spent mover_spent(struct device *device)
{
	(void)device;
	return (struct mover_spent){ 0 };
}

bool mover_rests(struct device *device)
{
	(void)device;
	return true;
}

uint64_t mover_mark(struct device *device, uint64_t bytes)
{
	(void)device;
	marked += bytes;
	return bytes;
}

uint64_t mover_owed(struct device *device)
{
	(void)device;
	return 0;
}

uint64_t mover_booked(struct device *device)
{
	uint64_t here = __atomic_load_n(&device->resident, __ATOMIC_SEQ_CST), moved;

	do	/* what was freed since is gone */
		moved = at_most(here, to_book);
	while (!__atomic_compare_exchange_n(&device->resident, &here, here - moved, false, __ATOMIC_SEQ_CST,
					    __ATOMIC_SEQ_CST));
	to_book = 0;
	__atomic_add_fetch(&device->swapped, moved, __ATOMIC_SEQ_CST);
	moved_out += moved;
	return moved;
}

uint64_t mover_in(struct device *device, uint64_t bytes, uint64_t *usec)
{
	uint64_t moved = 0;

	*usec = 0;
	for (uint64_t step = 64 * GG_MIB; moved < bytes && step >= GG_CHUNK;) {
		step = at_most(step, bytes - moved);
		if (daemon_move_in(device, step)) {
			step /= 2;
			continue;
		}
		__atomic_add_fetch(&device->resident, step, __ATOMIC_SEQ_CST);
		__atomic_sub_fetch(&device->swapped, step, __ATOMIC_SEQ_CST);
		moved += step;
	}
	moved_in += moved;
	return moved;
}

/* It has none. */
uint64_t piece_out(struct device *device, uint64_t bytes, uint64_t *usec)
{
	(void)usec;
	(void)device;
	(void)bytes;
	return 0;
}

uint64_t piece_in(struct device *device, uint64_t bytes, uint64_t *usec)
{
	(void)usec;
	(void)device;
	(void)bytes;
	return 0;
}

uint64_t mover_prepare(struct device *device, uint64_t bytes, uint64_t *usec)
{
	const uint64_t resident = __atomic_load_n(&device->resident, __ATOMIC_SEQ_CST), used = set_bytes;

	return mover_in(device, at_most(bytes, used > resident ? used - resident : 0), usec);
}

/* All that is on the GPU is of the working set, up to that. What is marked has not changed: that is no news to a
 * tick. */
static void tell(struct device *device, bool is_news)
{
	const uint64_t resident = __atomic_load_n(&device->resident, __ATOMIC_SEQ_CST);
	struct totals_page *page = counting;
	const int index = number_of(device->ordinal);

	if (!page || index < 0)
		return;
	__atomic_store_n(&page->set[index].used, set_bytes, __ATOMIC_RELAXED);
	__atomic_store_n(&page->set[index].resident, at_most(set_bytes, resident), __ATOMIC_RELAXED);
	__atomic_store_n(&page->set[index].unwritten,
			 turn == 1 ? at_most(is_news ? marked : page->set[index].unwritten, resident) : 0,
			 __ATOMIC_RELAXED);
	__atomic_store_n(&page->set[index].told, set_bytes ? TOTALS_ALONE : TOTALS_UNKNOWN, __ATOMIC_RELEASE);
}

void workset_tell(struct device *device)
{
	tell(device, true);
}

int64_t workset_tick(struct device *device, bool wanted)
{
	if (wanted)
		tell(device, false);
	return 2000;
}

void workset_turn_over(struct device *device)
{
	workset_tell(device);
}

void workset_prepared(struct device *device)
{
	(void)device;
}

bool workset_is_prepared(struct device *device)
{
	(void)device;
	return false;
}

void exchange_settle(struct device *device)
{
	(void)device;
}

int64_t exchange_tick(struct device *device)
{
	(void)device;
	return 2000;
}

static CUuuid uuid_of(int ordinal)
{
	static const unsigned char name[16] = { 0x50, 0xf7, 0x99, 0, 0, 0, 0x40, 0, 0x80 };
	CUuuid uuid;

	memcpy(&uuid, name, sizeof(name));
	uuid.bytes[15] = (char)ordinal;
	return uuid;
}

static void use(struct device *device, int ordinal)
{
	memset(device, 0, sizeof(*device));
	device->uuid = uuid_of(ordinal);
	device->ordinal = ordinal;
	device->index = -1;
	listener_begin();
	daemon_manage(device);
}

static int charge(uint64_t mib)
{
	int error = daemon_charge(&devices[0], mib * GG_MIB);

	if (!error)
		__atomic_add_fetch(&devices[0].resident, mib * GG_MIB, __ATOMIC_SEQ_CST);
	return error;
}

/* Frees what is on the GPU first, as much of it as is there: a move may take it away at any time. */
static void release(uint64_t bytes)
{
	uint64_t here = __atomic_load_n(&devices[0].resident, __ATOMIC_SEQ_CST), take;

	do
		take = at_most(here, bytes);
	while (!__atomic_compare_exchange_n(&devices[0].resident, &here, here - take, false, __ATOMIC_SEQ_CST,
					    __ATOMIC_SEQ_CST));
	daemon_uncharge(&devices[0], take, 0);
	if (take < bytes) {
		__atomic_sub_fetch(&devices[0].swapped, bytes - take, __ATOMIC_SEQ_CST);
		daemon_uncharge(&devices[0], 0, bytes - take);
	}
}

static void *busy(void *argument)
{
	unsigned long rounds = (unsigned long)argument, failed = 0;
	uint64_t total, free;

	for (unsigned long i = 0; i < rounds; i++) {
		if (charge(2)) {
			failed++;
			continue;
		}
		if (i % 16 == 0)
			daemon_limits(&devices[0], &total, &free);
		__atomic_store_n(&devices[0].foreign, i * GG_MIB, __ATOMIC_RELAXED);
		daemon_report(&devices[0]);
		daemon_uncharge(&devices[0], 2 * GG_MIB, 0);
		__atomic_sub_fetch(&devices[0].resident, 2 * GG_MIB, __ATOMIC_SEQ_CST);
	}
	return (void *)failed;
}

static unsigned long threads(unsigned long count, unsigned long rounds)
{
	pthread_t ids[64];
	unsigned long failed = 0;
	void *result;

	for (unsigned long i = 0; i < count; i++)
		pthread_create(&ids[i], NULL, busy, (void *)rounds);
	for (unsigned long i = 0; i < count; i++) {
		pthread_join(ids[i], &result);
		failed += (unsigned long)result;
	}
	return failed;
}

static int in_a_child(uint64_t mib)
{
	int status;
	pid_t child = fork();

	if (!child) {
		daemon_forget();
		sight_forget();
		if (session.running || session.socket.fd >= 0)
			_exit(90);
		if (charge(mib))	/* no daemon: granted */
			_exit(91);
		use(&devices[0], 0);
		_exit(number_of(0) ? 92 : charge(mib));
	}
	waitpid(child, &status, 0);
	return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

int main(void)
{
	char line[256], command[32];
	unsigned long a, b, c;

	setvbuf(stdout, NULL, _IOLBF, 0);
	while (fgets(line, sizeof(line), stdin)) {
		uint64_t total = 0, free = 0;

		a = b = c = 0;
		if (sscanf(line, "%31s %lu %lu %lu", command, &a, &b, &c) < 1)
			continue;
		if (!strcmp(command, "use")) {
			use(&devices[a != 0], (int)a);
			printf("%d\n", number_of(a != 0));
		} else if (!strcmp(command, "charge")) {
			printf("%d\n", charge(a));
		} else if (!strcmp(command, "free")) {
			release(a * GG_MIB);
			puts("0");
		} else if (!strcmp(command, "limits")) {
			bool limited = daemon_limits(&devices[0], &total, &free);

			printf("%d %llu %llu\n", limited, (unsigned long long)(total / GG_MIB),
			       (unsigned long long)(free / GG_MIB));
		} else if (!strcmp(command, "sight")) {
			CUuuid uuid = uuid_of((int)a);
			uint64_t most = 0;
			bool kept;

			if (!sight_looked((int)a))
				sight_look((int)a, &uuid);
			kept = sight_kept((int)a, &most);
			printf("%d %llu\n", kept, (unsigned long long)(most / GG_MIB));
		} else if (!strcmp(command, "report")) {
			devices[0].foreign = a * GG_MIB;
			devices[0].exchanged = b * GG_MIB;
			devices[0].away = c * GG_MIB;
			daemon_report(&devices[0]);
			puts("0");
		} else if (!strcmp(command, "lend")) {
			__atomic_store_n(&devices[0].lent, a * GG_MIB, __ATOMIC_RELAXED);
			daemon_report(&devices[0]);
			puts("0");
		} else if (!strcmp(command, "closed")) {
			__atomic_store_n(&lent_look, 1, __ATOMIC_RELAXED);
			puts("0");
		} else if (!strcmp(command, "host")) {
			__atomic_store_n(&devices[0].host_held, a * GG_MIB, __ATOMIC_RELAXED);
			__atomic_store_n(&devices[0].host_used, b * GG_MIB, __ATOMIC_RELAXED);
			__atomic_store_n(&devices[0].host_wanted, c * GG_MIB, __ATOMIC_RELAXED);
			daemon_report(&devices[0]);
			puts("0");
		} else if (!strcmp(command, "sms")) {
			printf("%llu\n", (unsigned long long)groups);
		} else if (!strcmp(command, "marked")) {
			printf("%llu\n", (unsigned long long)(marked / GG_MIB));
		} else if (!strcmp(command, "clean")) {
			__atomic_store_n(&devices[0].clean, a * GG_MIB, __ATOMIC_RELAXED);
			daemon_report(&devices[0]);
			puts("0");
		} else if (!strcmp(command, "granted")) {
			printf("%u %llu\n", grants, (unsigned long long)(granted == UINT64_MAX ? 0 : granted / GG_MIB));
		} else if (!strcmp(command, "kernels")) {
			kernels += a;
			count(counting);
			puts("0");
		} else if (!strcmp(command, "status")) {
			printf("%llu %llu %d\n",
			       (unsigned long long)(__atomic_load_n(&devices[0].resident, __ATOMIC_SEQ_CST) / GG_MIB),
			       (unsigned long long)(__atomic_load_n(&devices[0].swapped, __ATOMIC_SEQ_CST) / GG_MIB),
			       number_of(0));
		} else if (!strcmp(command, "moves")) {
			printf("%llu %llu\n", (unsigned long long)(moved_out / GG_MIB),
			       (unsigned long long)(moved_in / GG_MIB));
		} else if (!strcmp(command, "turn")) {
			printf("%d %llu\n", turn, (unsigned long long)turn_us);
		} else if (!strcmp(command, "ranks")) {
			printf("%llu %llu %llu", (unsigned long long)led_by, (unsigned long long)held_for_us,
			       (unsigned long long)yields_us);
			for (unsigned int i = 0; i < BURST_LEADERS; i++)
				printf(" %llu", (unsigned long long)followed[i]);
			puts("");
		} else if (!strcmp(command, "set")) {
			set_bytes = a * GG_MIB;
			session_wake();
			puts("0");
		} else if (!strcmp(command, "delay")) {
			delay_ms = (unsigned int)a;
			puts("0");
		} else if (!strcmp(command, "pool")) {
			pooled = a * GG_MIB;
			puts("0");
		} else if (!strcmp(command, "threads")) {
			printf("%lu\n", threads(a, b));
		} else if (!strcmp(command, "closefrom")) {
			puts(syscall(SYS_close_range, 3U, ~0U, 0) ? "failed" : "0");
		} else if (!strcmp(command, "take")) {
			/* A file of the program's own, on the numbers that the library had. */
			for (int fd = 512; fd < 516; fd++)
				dup2(1, fd);
			puts("0");
		} else if (!strcmp(command, "taken")) {
			struct stat ours, there;
			int same = 0;

			fstat(1, &ours);
			for (int fd = 512; fd < 516; fd++)
				same += !fstat(fd, &there) && there.st_ino == ours.st_ino;
			printf("%d\n", same);
		} else if (!strcmp(command, "family")) {
			puts(getenv("GGROUP_FAMILY") ? getenv("GGROUP_FAMILY") : "none");
		} else if (!strcmp(command, "fork")) {
			printf("%d\n", in_a_child(a));
		} else if (!strcmp(command, "ticks")) {
			unsigned int before = ticks;

			usleep((unsigned int)a * 1000);
			printf("%u\n", ticks - before);
		} else if (!strcmp(command, "wake")) {
			unsigned int before = ticks;

			counters_wake();
			while (ticks == before)
				usleep(1000);
			puts("0");
		} else {
			puts("what?");
		}
	}
	return 0;
}
