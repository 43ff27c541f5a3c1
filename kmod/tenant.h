/* SPDX-License-Identifier: GPL-2.0 */
/* The ioctls of a program, by their names in the ABI, which documents them. */
#ifndef GGROUP_TENANT_H
#define GGROUP_TENANT_H

struct ggroup_call;

/**
 * DOC: ioctls
 *
 * Each function does the ioctl of its name, with the group and arguments of the call, after the
 * table of ioctl.c has admitted the caller. It returns 0 or one of the errors that the ABI lists.
 */
int ggroup_tenant_hello(struct ggroup_call *call);
int ggroup_tenant_join(struct ggroup_call *call);
int ggroup_tenant_charge(struct ggroup_call *call);
int ggroup_tenant_uncharge(struct ggroup_call *call);
int ggroup_tenant_uncharge_swap(struct ggroup_call *call);
int ggroup_tenant_swap_out(struct ggroup_call *call);
int ggroup_tenant_swap_in(struct ggroup_call *call);
int ggroup_tenant_usermem(struct ggroup_call *call);
int ggroup_tenant_get(struct ggroup_call *call);

#endif
