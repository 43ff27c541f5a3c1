/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What takes time on a GPU, and is shared by all processes that have it: its engine for kernels, its bus each way, and
 * the lock of its driver. FAKE_TIMED=path: the file in which that is (timed.py), and its figures. Memory has no
 * contents then.
 *
 * The bus and the lock serve in the order in which they are asked, and a caller knows at once when it is served. So
 * what a program does is as far ahead as it takes, and its thread, which a busy machine may run late, catches up.
 */
#ifndef FAKE_TIMED_H
#define FAKE_TIMED_H

#include <stdbool.h>
#include <stdint.h>

/* Figures of a call of the driver, of memory of the GPU or of the host. */
enum fake_call { FAKE_CREATE, FAKE_MAP, FAKE_ACCESS, FAKE_UNMAP, FAKE_RELEASE, FAKE_CALLS };

bool fake_timed(void);
/* `bytes` go over the bus that way (enum way of memory.c): returns once they have. */
void fake_timed_copy(int way, uint64_t bytes);
/* A call about so many bytes: returns once it is done. */
void fake_timed_call(enum fake_call call, bool host, uint64_t bytes);
/* A kernel of this process: reads so many bytes of the GPU, and of the host. Returns once it has ended. */
void fake_timed_kernel(uint64_t ns, uint64_t gpu_bytes, uint64_t host_bytes);

#endif
