/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The size that a GPU appears to have. Frameworks ask for it before their first context, and keep the figure. So the
 * daemon is asked once, at the first question, and the answer holds until the program ends (exec is an end), whatever
 * becomes of limits, of the slice and of the daemon.
 *
 * The question goes over a connection of its own, in the thread that asks. Merely looking at a GPU neither puts the
 * program into the tree nor has its memory managed, and it neither starts a thread of the library nor waits for one.
 */
#ifndef GGROUP_CUDA_SIGHT_H
#define GGROUP_CUDA_SIGHT_H

#include <stdbool.h>
#include <stdint.h>

#include "api.h"

/* Get the most bytes that a device appears to have: UINT64_MAX for as much as the driver says. False where no figure is
 * kept, as the daemon was not asked, or is older and cannot tell: then its limits count (daemon_limits). */
bool sight_kept(CUdevice ordinal, uint64_t *most);
/* Ask the daemon, once; waits for it as a first allocation does. `uuid` is the device's: the caller asks the driver for
 * it, and holds no lock meanwhile, since another thread may be in cuInit and ask from inside that. */
void sight_look(CUdevice ordinal, const CUuuid *uuid);
/* Return whether the daemon was asked. */
bool sight_looked(CUdevice ordinal);

/* The answers of NVML about a GPU, in bytes. */
struct sight {
	uint64_t total;		/* in all, as at the first question of either kind; UINT64_MAX: what the driver says */
	uint64_t free;		/* under all limits of this moment; UINT64_MAX: there is none */
	uint64_t used;		/* of the level with the least limit; 0: there is none */
};

/* Ask the daemon for these figures, each time. False where nothing is known of the GPU, as without a daemon, or with an
 * older one. */
bool sight_view(const CUuuid *uuid, struct sight *sight);

/* Ask the daemon which space the program is to be in, 0 for none; false where nothing answered. */
bool sight_space(uint64_t *number);

void sight_forget(void);	/* in the child of fork(): closes the child's copy of the parent's connection */

#endif
