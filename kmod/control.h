/* SPDX-License-Identifier: GPL-2.0 */
/* The ioctls of whoever controls, by their names in the ABI: see there. */
#ifndef GGROUP_CONTROL_H
#define GGROUP_CONTROL_H

struct ggroup_call;

int ggroup_call_add(struct ggroup_call *call);
int ggroup_call_find(struct ggroup_call *call);
int ggroup_call_next(struct ggroup_call *call);
int ggroup_call_move(struct ggroup_call *call);
int ggroup_call_remove(struct ggroup_call *call);
int ggroup_call_set(struct ggroup_call *call);
int ggroup_call_reset_peak(struct ggroup_call *call);
int ggroup_call_observe(struct ggroup_call *call);
int ggroup_call_note(struct ggroup_call *call);
int ggroup_call_press(struct ggroup_call *call);
int ggroup_call_plan(struct ggroup_call *call);
int ggroup_call_set_timeslice(struct ggroup_call *call);
int ggroup_call_attach_tsg(struct ggroup_call *call);
int ggroup_call_detach_tsg(struct ggroup_call *call);
int ggroup_call_reclaim(struct ggroup_call *call);
int ggroup_call_register(struct ggroup_call *call);
int ggroup_call_unregister(struct ggroup_call *call);
int ggroup_call_forget(struct ggroup_call *call);
int ggroup_call_events(struct ggroup_call *call);

#endif
