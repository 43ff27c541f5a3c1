/* SPDX-License-Identifier: GPL-2.0 */
/* The ioctls of a program, by their names in the ABI: see there. */
#ifndef GGROUP_TENANT_H
#define GGROUP_TENANT_H

struct ggroup_call;

int ggroup_call_hello(struct ggroup_call *call);
int ggroup_call_join(struct ggroup_call *call);
int ggroup_call_charge(struct ggroup_call *call);
int ggroup_call_uncharge(struct ggroup_call *call);
int ggroup_call_uncharge_swap(struct ggroup_call *call);
int ggroup_call_swap_out(struct ggroup_call *call);
int ggroup_call_swap_in(struct ggroup_call *call);
int ggroup_call_usermem(struct ggroup_call *call);
int ggroup_call_get(struct ggroup_call *call);

#endif
