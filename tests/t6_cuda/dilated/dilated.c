// SPDX-License-Identifier: Apache-2.0
/*
 * libdilated.so, to be preloaded, with FAKE_DILATION=n: CLOCK_MONOTONIC is n times as slow as it is, for the program,
 * the library in it and the double of the driver, and all that they wait for takes as many times as long. So a machine
 * that is busy with other things is n times as fast as it is: what a thread takes, and by how much it is late, counts
 * for less than what the GPU takes. Conditions are those of CLOCK_MONOTONIC.
 */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define SECOND INT64_C(1000000000)

static int64_t dilation(void)
{
	static int64_t times; /* atomically */
	int64_t found = __atomic_load_n(&times, __ATOMIC_RELAXED);

	if (!found) {
		const char *text = getenv("FAKE_DILATION");

		found = text ? strtoll(text, NULL, 0) : 1;
		found = found > 0 ? found : 1;
		__atomic_store_n(&times, found, __ATOMIC_RELAXED);
	}
	return found;
}

static struct timespec times(const struct timespec *time)
{
	const int64_t ns = (time->tv_sec * SECOND + time->tv_nsec) * dilation();

	return (struct timespec){ (time_t)(ns / SECOND), (long)(ns % SECOND) };
}

/* The system call, by no function that is one of these. */
static long call(long number, long a, long b, long c, long d, long e, long f)
{
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = f;
	long result;

	__asm__ volatile("syscall"
			 : "=a"(result)
			 : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
			 : "rcx", "r11", "memory");
	return result;
}

static int answer(long result)
{
	if (result >= 0)
		return (int)result;
	errno = (int)-result;
	return -1;
}

EXPORT int clock_gettime(clockid_t clock, struct timespec *time)
{
	const int result = answer(call(SYS_clock_gettime, clock, (long)time, 0, 0, 0, 0));
	int64_t ns;

	if (!result && clock == CLOCK_MONOTONIC && dilation() > 1) {
		ns = (time->tv_sec * SECOND + time->tv_nsec) / dilation();
		*time = (struct timespec){ (time_t)(ns / SECOND), (long)(ns % SECOND) };
	}
	return result;
}

EXPORT int clock_nanosleep(clockid_t clock, int flags, const struct timespec *time, struct timespec *left)
{
	const struct timespec real = clock == CLOCK_MONOTONIC ? times(time) : *time;

	return (int)-call(SYS_clock_nanosleep, clock, flags, (long)&real, (long)left, 0, 0);
}

EXPORT int nanosleep(const struct timespec *time, struct timespec *left)
{
	return answer(-clock_nanosleep(CLOCK_MONOTONIC, 0, time, left));
}

EXPORT int usleep(useconds_t us)
{
	return nanosleep(&(struct timespec){ us / 1000000, us % 1000000 * 1000L }, NULL);
}

EXPORT int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
				  const struct timespec *restrict until)
{
	const struct timespec real = times(until);

	return pthread_cond_clockwait(condition, mutex, CLOCK_MONOTONIC, &real);
}

EXPORT int ppoll(struct pollfd *fds, nfds_t count, const struct timespec *time, const sigset_t *mask)
{
	struct timespec real = time ? times(time) : (struct timespec){ 0 };

	return answer(call(SYS_ppoll, (long)fds, (long)count, time ? (long)&real : 0, (long)mask, _NSIG / 8, 0));
}

EXPORT int poll(struct pollfd *fds, nfds_t count, int ms)
{
	const struct timespec time = { ms / 1000, ms % 1000 * 1000000L };

	return ppoll(fds, count, ms < 0 ? NULL : &time, NULL);
}

EXPORT long syscall(long number, ...)
{
	struct timespec real;
	va_list arguments;
	long a[6];

	va_start(arguments, number);
	for (int i = 0; i < 6; i++)
		a[i] = va_arg(arguments, long);
	va_end(arguments);
	if (number == SYS_futex && (a[1] & FUTEX_CMD_MASK) == FUTEX_WAIT && a[3]) {
		real = times((const struct timespec *)a[3]);
		a[3] = (long)&real;
	}
	const long result = call(number, a[0], a[1], a[2], a[3], a[4], a[5]);

	if (result >= 0 || result < -4095)
		return result;
	errno = (int)-result;
	return -1;
}
