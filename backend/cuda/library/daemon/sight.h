/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How large a GPU looks to the program: frameworks ask before their first context, and keep the figure. So the daemon is
 * asked once, at the first question, and the answer holds until the program ends (exec is an end), whatever becomes of
 * limits, of the slice and of the daemon.
 *
 * The question goes by a connection of its own, in the thread that asks: the program is not managed, nor in the tree, by
 * looking at a GPU, and no thread of ours is begun, nor waited for.
 */
#ifndef GGROUP_CUDA_SIGHT_H
#define GGROUP_CUDA_SIGHT_H

#include <stdbool.h>
#include <stdint.h>

#include "api.h"

/* The most bytes that a device is to look as if it had: UINT64_MAX, what the driver says. false: nothing is kept, since
 * it was not asked for, or an older daemon cannot tell: what it says of its limits holds (daemon_limits). */
bool sight_kept(CUdevice ordinal, uint64_t *most);
/* Asks for it, once; waits for the daemon as a first allocation does. `uuid` is the device's: the caller asks the
 * driver for it, and holds no lock meanwhile, since another thread may be in cuInit and ask from inside that. */
void sight_look(CUdevice ordinal, const CUuuid *uuid);
/* Whether it was asked. */
bool sight_looked(CUdevice ordinal);

/* What NVML is to say of a GPU, in bytes. */
struct sight {
	uint64_t total;		/* in all, as at the first question of either kind; UINT64_MAX: what the driver says */
	uint64_t free;		/* under all limits of this moment; UINT64_MAX: there is none */
	uint64_t used;		/* of the level with the least limit; 0: there is none */
};

/* Asks for that, each time; false where nothing is known of it, as without a daemon, or with an older one. */
bool sight_view(const CUuuid *uuid, struct sight *sight);

void sight_forget(void);	/* in the child of fork(): closes what the parent asks by */

#endif
