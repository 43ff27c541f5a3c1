/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What multicast objects and sparse arrays have of the memory that is charged here: it lives until it is unbound, or they are
 * gone, whether the program has a handle of it, or has mapped it, or not. So long it is charged, and stays (pin.h).
 */
#ifndef GGROUP_CUDA_BINDING_H
#define GGROUP_CUDA_BINDING_H

#include "chunk.h"

struct binding;

/* Where in its holder something is bound. */
enum binding_kind { BINDING_MULTICAST, BINDING_LEVEL, BINDING_MIPTAIL };
struct binding_box {
	enum binding_kind kind;
	unsigned int level, layer;
	uint64_t from[3], to[3];
};

/* One that holds nothing yet; NULL without memory. */
struct binding *binding_new(void);
/* It is to hold an object that the caller has claimed; what else has a handle; what is at an address. Once. */
void binding_hold_object(struct binding *binding, struct region *object);
void binding_hold_handle(struct binding *binding, CUmemGenericAllocationHandle name);
void binding_hold_address(struct binding *binding, CUdeviceptr address);
/* The driver has bound it. `context`: the holder goes with that; or NULL. */
void binding_enter(struct binding *binding, uint64_t holder, CUcontext context, const struct binding_box *box);
/* ... or has not. */
void binding_drop(struct binding *binding);

/* The GPU that its memory is on, by its ordinal; -1: it is not known here. */
int binding_ordinal(const struct binding *binding);

/* What of one lies in a box of a holder. False: there is none. */
bool binding_find(uint64_t holder, const struct binding_box *box, struct binding_box *found);
/* Nothing that lies in a box of a holder is bound there any more; what lies beside it is. */
void binding_clear(uint64_t holder, const struct binding_box *box);
/* The holder is gone, and none is called so again. */
void binding_clear_all(uint64_t holder);
/* All of a holder that the driver is about to destroy: as soon as it has, another may be called so. */
struct binding *binding_take_all(uint64_t holder);
/* It is destroyed; or is not, and has them again. */
void binding_taken(struct binding *taken, bool destroyed);

#endif
