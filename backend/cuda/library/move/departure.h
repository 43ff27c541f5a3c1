/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The departure of a program to another GPU, by the driver's checkpoint and restore (cuCheckpointProcess..., cuda.h).
 *
 * The driver cannot restore memory that cuMemCreate made in the host: it answers 999, and the program is lost. Memory
 * of the GPU it carries through the host, at 2 GB/s. Exported memory that has neither a handle nor an address any more
 * it leaves alone (all measured: docs/nvidia.md). So between these two calls the library holds its chunks only by
 * descriptors, and nothing runs that could miss them; afterwards they are mapped where they were. Those that are then
 * on another GPU than the program are used from there, and come home bit by bit (home.h).
 *
 * Called by the listening thread.
 */
#ifndef GGROUP_CUDA_DEPARTURE_H
#define GGROUP_CUDA_DEPARTURE_H

#include <stdbool.h>

/* Stand by for a checkpoint. `near`: the program's new GPU can use memory of the old one; else the driver carries
 * that. 0: the program stands by, and its page says so. Otherwise everything is as before: EBUSY for work that does
 * not come to a rest, EOPNOTSUPP where memory is shared with other processes or the driver would lose it, EMFILE,
 * ENOMEM, EIO. */
int departure_begin(bool near);
bool departure_begun(void);
/* Map everything again, and let the program run. Waits in the driver while the process is checkpointed. */
void departure_end(void);

#endif
