/* SPDX-License-Identifier: GPL-2.0 */
/* The controlling ioctls, by their names in the ABI, which documents them. */
#ifndef GGROUP_CONTROL_H
#define GGROUP_CONTROL_H

struct ggroup_call;

/**
 * DOC: ioctls
 *
 * Each function does the ioctl of its name, with the group and arguments of the call, after the
 * table of ioctl.c has admitted the caller. It returns 0 or one of the errors that the ABI lists.
 */
int ggroup_control_add(struct ggroup_call *call);
int ggroup_control_find(struct ggroup_call *call);
int ggroup_control_next(struct ggroup_call *call);
int ggroup_control_move(struct ggroup_call *call);
int ggroup_control_remove(struct ggroup_call *call);
int ggroup_control_set(struct ggroup_call *call);
int ggroup_control_reasons(struct ggroup_call *call);
int ggroup_control_reset_peak(struct ggroup_call *call);
int ggroup_control_observe(struct ggroup_call *call);
int ggroup_control_note(struct ggroup_call *call);
int ggroup_control_press(struct ggroup_call *call);
int ggroup_control_plan(struct ggroup_call *call);
int ggroup_control_next_use(struct ggroup_call *call);
#define GGROUP_LEVER(name, bit, field)	int ggroup_control_set_##name(struct ggroup_call *call);
#include "settings.def"
int ggroup_control_attach_tsg(struct ggroup_call *call);
int ggroup_control_detach_tsg(struct ggroup_call *call);
int ggroup_control_reclaim(struct ggroup_call *call);
int ggroup_control_register(struct ggroup_call *call);
int ggroup_control_unregister(struct ggroup_call *call);
int ggroup_control_forget(struct ggroup_call *call);
int ggroup_control_events(struct ggroup_call *call);

#endif
