/* SPDX-License-Identifier: Apache-2.0 */
/* The time by which all waits and paces are measured. */
#ifndef GGROUP_CUDA_MOMENT_H
#define GGROUP_CUDA_MOMENT_H

#include <stdint.h>
#include <time.h>

/* CLOCK_MONOTONIC, in microseconds. */
static inline uint64_t moment_us(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

#endif
