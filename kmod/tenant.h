/* SPDX-License-Identifier: GPL-2.0 */
/* The ioctls of a program, by their names in the ABI: see there. */
#ifndef GGROUP_TENANT_H
#define GGROUP_TENANT_H

struct ggroup_call;

/**
 * DOC: ioctls
 *
 * Each does the ioctl of the ABI that has its name, of what the call says, where the table of
 * ioctl.c has let it. It returns 0 or one of the errors that the ABI has for it.
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
