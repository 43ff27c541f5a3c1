/* SPDX-License-Identifier: Apache-2.0 */
/* The clock of all waits and paces, and the means for threads to wait by it. */
#ifndef GGROUP_CUDA_MOMENT_H
#define GGROUP_CUDA_MOMENT_H

#include <pthread.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <time.h>

/* Timer slack of a thread that has to be punctual, in nanoseconds. The default of 50 us is a quarter of a hold, and as
 * much as a program that goes behind others may have pending on the GPU. */
#define MOMENT_SLACK_NS 1000

/* Returns CLOCK_MONOTONIC in microseconds. */
static inline uint64_t moment_us(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

/* Makes the calling thread wake on time. Returns its previous slack, in nanoseconds, for moment_late_again; 0 if that
 * is unknown or was as small. */
static inline unsigned long moment_punctual(void)
{
	const int before = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);

	if (before <= MOMENT_SLACK_NS || prctl(PR_SET_TIMERSLACK, (unsigned long)MOMENT_SLACK_NS, 0, 0, 0))
		return 0;
	return (unsigned long)before;
}

static inline void moment_late_again(unsigned long slack_ns)
{
	if (slack_ns)
		prctl(PR_SET_TIMERSLACK, slack_ns, 0, 0, 0);
}

/* Initialises a condition whose pthread_cond_timedwait(3) uses this clock; pthread_cond_clockwait(3) needs glibc 2.30
 * (glibc.h). */
static inline void moment_condition(pthread_cond_t *condition)
{
	pthread_condattr_t attributes;

	pthread_condattr_init(&attributes);
	pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	pthread_cond_init(condition, &attributes);
	pthread_condattr_destroy(&attributes);
}

#endif
