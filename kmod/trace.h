/* SPDX-License-Identifier: GPL-2.0 */
/* Tracepoints: trace-cmd record -e ggroup, or /sys/kernel/tracing/events/ggroup. */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM ggroup

#if !defined(GGROUP_TRACE_H) || defined(TRACE_HEADER_MULTI_READ)
#define GGROUP_TRACE_H

#include <linux/tracepoint.h>

#include "uapi/ggroup.h"

/* An ioctl; through it, every read and write of a mounted control file shows. */
TRACE_EVENT(ggroup_ioctl,
	    TP_PROTO(unsigned int nr, u64 id, int status),
	    TP_ARGS(nr, id, status),
	    TP_STRUCT__entry(__field(unsigned int, nr)
			     __field(u64, id)
			     __field(int, status)),
	    TP_fast_assign(__entry->nr = nr;
			   __entry->id = id;
			   __entry->status = status;),
	    TP_printk("%s id=%llu status=%d",
		      __print_symbolic(__entry->nr,
				       { _IOC_NR(GGROUP_IOC_HELLO), "hello" },
				       { _IOC_NR(GGROUP_IOC_JOIN), "join" },
				       { _IOC_NR(GGROUP_IOC_CHARGE), "charge" },
				       { _IOC_NR(GGROUP_IOC_UNCHARGE), "uncharge" },
				       { _IOC_NR(GGROUP_IOC_UNCHARGE_SWAP), "uncharge_swap" },
				       { _IOC_NR(GGROUP_IOC_SWAP_OUT), "swap_out" },
				       { _IOC_NR(GGROUP_IOC_SWAP_IN), "swap_in" },
				       { _IOC_NR(GGROUP_IOC_USERMEM), "usermem" },
				       { _IOC_NR(GGROUP_IOC_GET), "get" },
				       { _IOC_NR(GGROUP_IOC_ADD), "add" },
				       { _IOC_NR(GGROUP_IOC_FIND), "find" },
				       { _IOC_NR(GGROUP_IOC_NEXT), "next" },
				       { _IOC_NR(GGROUP_IOC_MOVE), "move" },
				       { _IOC_NR(GGROUP_IOC_REMOVE), "remove" },
				       { _IOC_NR(GGROUP_IOC_SET), "set" },
				       { _IOC_NR(GGROUP_IOC_RESET_PEAK), "reset_peak" },
				       { _IOC_NR(GGROUP_IOC_OBSERVE), "observe" },
				       { _IOC_NR(GGROUP_IOC_NOTE), "note" },
				       { _IOC_NR(GGROUP_IOC_PRESS), "press" },
				       { _IOC_NR(GGROUP_IOC_PLAN), "plan" },
				       { _IOC_NR(GGROUP_IOC_SET_TIMESLICE), "set_timeslice" },
				       { _IOC_NR(GGROUP_IOC_ATTACH_TSG), "attach_tsg" },
				       { _IOC_NR(GGROUP_IOC_DETACH_TSG), "detach_tsg" },
				       { _IOC_NR(GGROUP_IOC_RECLAIM), "reclaim" },
				       { _IOC_NR(GGROUP_IOC_REASONS), "reasons" },
				       { _IOC_NR(GGROUP_IOC_NEXT_USE), "next_use" },
				       { _IOC_NR(GGROUP_IOC_SET_SM_MAX), "set_sm_max" },
				       { _IOC_NR(GGROUP_IOC_REGISTER), "register" },
				       { _IOC_NR(GGROUP_IOC_UNREGISTER), "unregister" },
				       { _IOC_NR(GGROUP_IOC_FORGET), "forget" },
				       { _IOC_NR(GGROUP_IOC_EVENTS), "events" }),
		      __entry->id, __entry->status)
);

/* A charge, granted or refused. */
TRACE_EVENT(ggroup_charge,
	    TP_PROTO(u64 id, u64 nbytes, int status),
	    TP_ARGS(id, nbytes, status),
	    TP_STRUCT__entry(__field(u64, id)
			     __field(u64, nbytes)
			     __field(int, status)),
	    TP_fast_assign(__entry->id = id;
			   __entry->nbytes = nbytes;
			   __entry->status = status;),
	    TP_printk("id=%llu nbytes=%llu status=%d", __entry->id, __entry->nbytes,
		      __entry->status)
);

/* A charge left a group over its high. */
TRACE_EVENT(ggroup_over_high,
	    TP_PROTO(u64 id, u64 current_bytes, u64 high),
	    TP_ARGS(id, current_bytes, high),
	    TP_STRUCT__entry(__field(u64, id)
			     __field(u64, current_bytes)
			     __field(u64, high)),
	    TP_fast_assign(__entry->id = id;
			   __entry->current_bytes = current_bytes;
			   __entry->high = high;),
	    TP_printk("id=%llu current=%llu high=%llu", __entry->id, __entry->current_bytes,
		      __entry->high)
);

/* Memory was taken from a process, or could not be. */
TRACE_EVENT(ggroup_reclaim,
	    TP_PROTO(u64 id, u64 nbytes, u64 moved, int status),
	    TP_ARGS(id, nbytes, moved, status),
	    TP_STRUCT__entry(__field(u64, id)
			     __field(u64, nbytes)
			     __field(u64, moved)
			     __field(int, status)),
	    TP_fast_assign(__entry->id = id;
			   __entry->nbytes = nbytes;
			   __entry->moved = moved;
			   __entry->status = status;),
	    TP_printk("id=%llu nbytes=%llu moved=%llu status=%d", __entry->id, __entry->nbytes,
		      __entry->moved, __entry->status)
);

/* An event that listeners are told of. */
TRACE_EVENT(ggroup_event,
	    TP_PROTO(u64 id, u32 channel),
	    TP_ARGS(id, channel),
	    TP_STRUCT__entry(__field(u64, id)
			     __field(u32, channel)),
	    TP_fast_assign(__entry->id = id;
			   __entry->channel = channel;),
	    TP_printk("id=%llu %s", __entry->id,
		      __print_symbolic(__entry->channel,
				       { GGROUP_CHANNEL_GMEM, "gmem" },
				       { GGROUP_CHANNEL_USERMEM, "usermem" },
				       { GGROUP_CHANNEL_EXIT, "exit" },
				       { GGROUP_CHANNEL_SET, "set" }))
);

/* The provider answered for a lever. */
TRACE_EVENT(ggroup_tsg,
	    TP_PROTO(u64 id, u32 op, u64 value, int status),
	    TP_ARGS(id, op, value, status),
	    TP_STRUCT__entry(__field(u64, id)
			     __field(u32, op)
			     __field(u64, value)
			     __field(int, status)),
	    TP_fast_assign(__entry->id = id;
			   __entry->op = op;
			   __entry->value = value;
			   __entry->status = status;),
	    TP_printk("id=%llu %s value=%llu status=%d", __entry->id,
		      __print_symbolic(__entry->op,
				       { GGROUP_OP_SET_TIMESLICE, "set_timeslice" },
				       { GGROUP_OP_SET_SM_MAX, "set_sm_max" },
				       { GGROUP_OP_ATTACH_TSG, "attach_tsg" },
				       { GGROUP_OP_DETACH_TSG, "detach_tsg" },
				       { GGROUP_OP_RECLAIM, "reclaim" }),
		      __entry->value, __entry->status)
);

#endif

#undef TRACE_INCLUDE_PATH
#define TRACE_INCLUDE_PATH .
#undef TRACE_INCLUDE_FILE
#define TRACE_INCLUDE_FILE trace
#include <trace/define_trace.h>
