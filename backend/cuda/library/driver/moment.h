/* SPDX-License-Identifier: Apache-2.0 */
/* The time by which all waits and paces are measured. */
#ifndef GGROUP_CUDA_MOMENT_H
#define GGROUP_CUDA_MOMENT_H

#include <pthread.h>
#include <stdint.h>
#include <time.h>

/* CLOCK_MONOTONIC, in microseconds. */
static inline uint64_t moment_us(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

/* A condition whose pthread_cond_timedwait(3) ends by that clock: pthread_cond_clockwait(3) is of glibc 2.30
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
