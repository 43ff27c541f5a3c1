/* SPDX-License-Identifier: Apache-2.0 */
/* The pinned chunks of the host, each with its window. A context as for pool.h. */
#ifndef GGROUP_CUDA_HOST_H
#define GGROUP_CUDA_HOST_H

#include "chunk.h"

/* A chunk of the host, with its window: one that is kept, or else a new one. */
CUresult host_take(struct device *device, enum chunk_class class, struct spare *spare);
/* Takes it back; mapped nowhere but at its window. No call of the driver where it is kept. */
void host_give(struct device *device, enum chunk_class class, struct spare spare);
/* Frees it. */
void host_drop(struct device *device, enum chunk_class class, struct spare spare);
/* The bytes kept in the host. */
uint64_t host_kept(struct device *device);
/* From here to the other nothing is kept or made in the host ahead: returns once it is so. */
void host_halt(struct device *device);
void host_resume(struct device *device);

/* The figures of struct device that the daemon is told are what the pool has. With the lock of the pool. */
void host_count(struct device *device);

/* A chunk of the host that is taken is a copy of one on the GPU from now on, or is so no more. */
void host_is_copy(struct device *device, enum chunk_class class, bool is_copy);
/* Bytes of those of a class. */
uint64_t host_copies(struct device *device, enum chunk_class class);
/* Whether one more of a class would have to be made, and is more than may be. */
bool host_is_short(struct device *device, enum chunk_class class);

/* Frees one that is kept, if there are more than may be; false: there are not. A context as for pool.h. */
bool host_shed(struct device *device);

/* Microseconds that chunks took to be made for what had to go, and not ahead, ever. */
uint64_t host_made_us(struct device *device);

/* A new chunk of the host, mapped at its window. */
CUresult host_make(struct device *device, enum chunk_class class, struct spare *spare);

#endif
