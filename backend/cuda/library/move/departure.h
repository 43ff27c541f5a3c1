/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program that goes to another GPU, by a checkpoint and a restore of the driver's (cuCheckpointProcess..., cuda.h).
 *
 * The driver cannot restore memory that cuMemCreate made in the host: it answers 999, and the program is lost. What it
 * carries of the GPU's it carries through the host, at 2 GB/s. Memory that was exported, and has neither a handle nor an
 * address any more, it leaves alone (all measured: docs/nvidia.md). So between these two calls our chunks are held by
 * descriptors only, and nothing runs that could miss them; afterwards they are mapped where they were. Those that are on
 * another GPU than the program then are used from there, and come home bit by bit (home.h).
 *
 * Called by the listening thread.
 */
#ifndef GGROUP_CUDA_DEPARTURE_H
#define GGROUP_CUDA_DEPARTURE_H

#include <stdbool.h>

/* `near`: what is on a GPU can be used from where the program goes; else the driver carries that. 0: it stands by, and
 * its page says so. Else all is as before: EBUSY for something that does not come to a rest,
 * EOPNOTSUPP where memory is shared with others or the driver would lose it, EMFILE, ENOMEM, EIO. */
int departure_begin(bool near);
bool departure_begun(void);
/* Maps everything again, and lets it run. Waits in the driver while the process is checkpointed. */
void departure_end(void);

#endif
