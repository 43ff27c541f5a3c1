/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory charged here that is bound in multicast objects and sparse arrays. It lives until it is unbound, or they are
 * gone, whether or not the program still has a handle of it or a mapping. Until then it is charged, and stays in place
 * (pin.h).
 */
#ifndef GGROUP_CUDA_BINDING_H
#define GGROUP_CUDA_BINDING_H

#include "chunk.h"

struct binding;

/* The place of bound memory in its holder. */
enum binding_kind { BINDING_MULTICAST, BINDING_LEVEL, BINDING_MIPTAIL };
struct binding_box {
	enum binding_kind kind;
	unsigned int level, layer;
	uint64_t from[3], to[3];
};

/* Return a binding that holds nothing yet; NULL without memory. */
struct binding *binding_new(void);
/* Have a binding hold an object that the caller has claimed; other memory by its handle; or memory at an address. Once
 * each. */
void binding_hold_object(struct binding *binding, struct region *object);
void binding_hold_handle(struct binding *binding, CUmemGenericAllocationHandle name);
void binding_hold_address(struct binding *binding, CUdeviceptr address);
/* Note that the driver has bound it. `context`: the one that the holder goes with; or NULL. */
void binding_enter(struct binding *binding, uint64_t holder, CUcontext context, const struct binding_box *box);
/* Drop a binding that the driver refused. */
void binding_drop(struct binding *binding);

/* Return the ordinal of the GPU that the memory is on; -1 where it is unknown here. */
int binding_ordinal(const struct binding *binding);

/* Find a bound part within a box of a holder. False for none. */
bool binding_find(uint64_t holder, const struct binding_box *box, struct binding_box *found);
/* End all bindings within a box of a holder; parts beside it stay bound. */
void binding_clear(uint64_t holder, const struct binding_box *box);
/* End all bindings of a holder that is gone, with a handle that is not used again. */
void binding_clear_all(uint64_t holder);
/* Take all bindings of a holder that the driver is about to destroy: after that, another holder may get its handle. */
struct binding *binding_take_all(uint64_t holder);
/* End them, if it was destroyed; else give them back. */
void binding_taken(struct binding *taken, bool destroyed);

#endif
