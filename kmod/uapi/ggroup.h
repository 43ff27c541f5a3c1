/* SPDX-License-Identifier: (GPL-2.0 WITH Linux-syscall-note) OR MIT */
/*
 * ggroup: the books of GPU control groups, kept by the kernel.
 *
 * Everything goes through /dev/ggroup. This header is the whole interface; backend/ledgers/abi.py
 * mirrors it, and a test compares every size, offset and number of the two.
 *
 * WHAT IS KEPT. A GPU is identified by its UUID. Its groups form a tree: the root, which stands
 * for the GPU and whose high is the capacity; slices below it, each with a path; and processes as
 * leaves. A process is identified by its struct pid, so a recycled pid never inherits anything; the
 * start time given by user space (clock ticks since boot, field 22 of /proc/PID/stat) is compared
 * when a group is made or looked up. Pids are those of the caller's pid namespace. A group has an
 * id that is never reused; the id of a root stands for the GPU. Id 0 is the caller's own group, on
 * a file that joined. The books outlive every program: they end with GGROUP_IOC_FORGET,
 * GGROUP_UNREGISTER_FORGET or the module.
 *
 * RIGHTS. Every process may open the device and join, and then act on its own group with the file
 * that it opened: charge, uncharge, swap, usermemfd, counters, GET. The file is bound to the
 * process: in a child that inherited it, or a process that was handed it, the same calls give
 * EPERM. The owner of a slice controls the groups below it, except those that another user owns,
 * but not the slice itself: GET, FIND, SET, RESET_PEAK, PLAN, PRESS, RECLAIM and usermemfd.
 * Everything else needs CAP_SYS_ADMIN in the initial user namespace: GPUs, owners, the shape of
 * the tree, figures of others, and levers, since a process's levers combine the settings of all
 * levels above it. The number of files that a user can have open is bounded (EMFILE).
 *
 * HOW MUCH. Sizes are bytes, times microseconds. GGROUP_MAX is "no limit", and no group ever
 * holds more. A charge goes to a process and every group above it. A charge over a high does not
 * fail: memory is reclaimed afterwards. A charge never goes over a limit_max: memory is reclaimed
 * first. A charge fails with ENOMEM if some swap_max leaves no room to bring every level back under
 * its high, or to make room under a limit_max, as backend/ledgers/soft.py specifies. It also fails
 * with ENOMEM if a program would report more of its own memory, on the GPU or not, than
 * GGROUP_OVERCOMMIT times the capacity. A call takes effect as a whole, or fails and changes
 * nothing.
 *
 * HOW MANY. A GPU has at most 65536 groups (ENOSPC). A user other than root has at most
 * GGROUP_MAX_SLICES_PER_USER slices on it, and as many processes as the module's parameter
 * processes_per_user says. A slice counts for the next owner at or above its parent at the time it
 * is made, a process for its real user at the time its group is made, until they are removed. A
 * slice made below one that a user owns is at most GGROUP_MAX_DEPTH levels below the root, any
 * other GGROUP_MAX_DEPTH_ROOT. More is EAGAIN, as with cgroup.max.descendants and
 * cgroup.max.depth.
 *
 * THE HARDWARE. The kernel knows no GPU vendor. A provider registers a GPU on an open
 * /dev/ggroup and serves its commands on that file: read() gives struct ggroup_message, as many
 * as fit, and waits for one unless O_NONBLOCK; write() takes the answers; poll() tells when there
 * is something to read. A GPU has one provider; a second one is refused with EBUSY. When the file
 * is closed for good, the GPU is offline: levers give ENODEV, the books go on. The levers' settings
 * stay, and the next provider is told them again. What the former provider had acknowledged
 * is still reported (GGROUP_BOOKS_DETACHED); a command that it had got and not acknowledged is
 * reported as in doubt (GGROUP_BOOKS_DOUBTFUL).
 *
 * OFF THE RUNLIST. A process is off the runlist of a GPU for a set of reasons (GGROUP_REASON_*),
 * each of which takes all engines, or GR (graphics and compute) alone. The daemon gives the whole
 * set with GGROUP_IOC_REASONS, and moves the lever to the union with ATTACH_TSG and DETACH_TSG. The
 * books keep the set, so the next daemon knows why each process is off; it means nothing to the
 * kernel.
 *
 * NEXT USE. A plan first takes the memory that will be used last. The daemon sets with
 * GGROUP_IOC_NEXT_USE how soon each process uses its memory again, as a class, which applies for
 * GGROUP_NEXT_USE_S seconds. Once the daemon is gone, plans therefore go by size alone, as they do
 * among processes of one class, and without GGROUP_FEATURE_NEXT_USE. The daemon gives the classes
 * their meaning: to the kernel, the greater is the farther.
 *
 * EXITS. While a GPU has a provider, the group of a process that exited stays as it is, is marked
 * GGROUP_BOOKS_DEAD and announced (GGROUP_CHANNEL_EXIT), until the provider removes it or goes.
 * Without one it is removed at once, and its charges are taken off every group above.
 *
 * GROWTH. Structures only grow, at the end, and new fields have no effect when zero. The size is
 * part of the number of an ioctl; the kernel takes any size from that of version 1 on, and refuses
 * one longer than it knows with E2BIG unless the rest is zero. Reserved fields and unknown flags
 * must be zero, EINVAL otherwise. GGROUP_IOC_HELLO tells the version, which changes when a meaning
 * changes, and the features. Every addition after version 1 has a feature; a program that finds it
 * missing does without, and ignores features that it does not know.
 *
 * ERRORS, besides those named at each call: EFAULT for a bad pointer, EINVAL for an invalid value,
 * ENODEV for a group or GPU that does not exist (any more), ENOTTY for a number that is no ioctl of
 * this device, EPERM for a missing right, ENOMEM also for the kernel's own memory.
 */
#ifndef _UAPI_GGROUP_H
#define _UAPI_GGROUP_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define GGROUP_ABI_VERSION	1

/* No limit; as the kernel's PAGE_COUNTER_MAX. */
#define GGROUP_MAX		0x7fffffffffffffffULL
#define GGROUP_OVERCOMMIT	16			/* capacities a program may say it has */
#define GGROUP_UUID_LEN		64			/* with the NUL */
#define GGROUP_PATH_LEN		4096			/* with the NUL */
#define GGROUP_MAX_DEPTH	32			/* levels of slices made by users */
#define GGROUP_MAX_DEPTH_ROOT	128			/* levels of slices made by root */
#define GGROUP_MAX_SLICES_PER_USER	4096		/* per user on one GPU; root may have all */
#define GGROUP_RESETS_MOST	64			/* files per group; root may have more */
#define GGROUP_TIMEOUT_MS	5000			/* applies if a timeout of 0 is given */
#define GGROUP_TIMEOUT_MS_MOST	600000

#define GGROUP_PRIORITY_MOST	15
#define GGROUP_PRIORITY_DEFAULT	8
#define GGROUP_WEIGHT_MOST	10000
#define GGROUP_WEIGHT_DEFAULT	100
#define GGROUP_QUOTA_LEAST_US	1000
#define GGROUP_PERIOD_LEAST_US	10000
#define GGROUP_PERIOD_MOST_US	1000000
#define GGROUP_PERIOD_DEFAULT_US	100000

/* struct ggroup_hello.features */
#define GGROUP_FEATURE_BOOKS	0x1ULL	/* groups, charges, limits, plans */
#define GGROUP_FEATURE_PROVIDER	0x2ULL	/* GPUs served by programs, and their levers */
#define GGROUP_FEATURE_TENANT	0x4ULL	/* join, and charges by the process itself */
#define GGROUP_FEATURE_USERMEM	0x8ULL	/* usermemfd */
#define GGROUP_FEATURE_COUNTERS	0x10ULL	/* the mapped page of kernel counters */
#define GGROUP_FEATURE_BOUNDS	0x20ULL	/* bounds on what one user can make: see HOW MANY */
#define GGROUP_FEATURE_PEAKS	0x40ULL	/* swap_peak, peaks ever, and resets of one file alone */
#define GGROUP_FEATURE_REASONS	0x80ULL	/* why a process is off the runlist, and of GR alone */
#define GGROUP_FEATURE_NEXT_USE	0x100ULL	/* plans take from the farthest next use first */

/* The version and the features of this kernel. */
struct ggroup_hello {
	__u32 version;		/* out: GGROUP_ABI_VERSION */
	__u32 reserved;
	__u64 features;		/* out: GGROUP_FEATURE_* */
	__u64 settings;		/* out: GGROUP_SET_* that SET takes; 0: those up to GID */
};

/* struct ggroup_gpu.flags */
#define GGROUP_GPU_INHERITED	0x1U	/* out: the books existed already */

/*
 * A GPU. REGISTER makes this file its provider and opens its books, or continues existing ones:
 * then capacity, granule and headroom are replaced, and the charges of processes that have not
 * joined by themselves are void, since the provider is about to say what they hold.
 */
struct ggroup_gpu {
	char uuid[GGROUP_UUID_LEN];	/* in: any non-empty string that ends within */
	__u64 capacity;		/* in: high of the root */
	__u64 granule;		/* in: bytes that move together, at least 1 */
	__u64 headroom;		/* in: bytes below a high at which tenants' charges wake reclaim; */
				/* of each group at most an eighth of its high */
	__u64 root;		/* out: id of the root */
	__u32 flags;		/* out: GGROUP_GPU_* */
	__u32 reserved;
};

/* struct ggroup_unregister.flags */
#define GGROUP_UNREGISTER_RELEASED	0x1U	/* all TSGs and timeslices are given back */
#define GGROUP_UNREGISTER_FORGET	0x2U	/* the GPU no longer exists: close its books */

struct ggroup_unregister {
	__u32 flags;		/* in: GGROUP_UNREGISTER_* */
	__u32 reserved;
};

/* struct ggroup_group.kind */
#define GGROUP_KIND_ROOT	0
#define GGROUP_KIND_SLICE	1
#define GGROUP_KIND_PROCESS	2

/* A group by its name. Each ioctl says which fields it reads and which it writes. */
struct ggroup_group {
	__u64 root;		/* id of the GPU's root */
	__u64 parent;		/* id of the group above, 0 for none */
	__u64 id;
	__u64 start;		/* process: start time, clock ticks since boot */
	__s32 pid;		/* process: thread group id; 0 where the caller cannot see it */
	__u32 kind;		/* GGROUP_KIND_* */
	char path[GGROUP_PATH_LEN];	/* slice: absolute path; root: UUID; process: empty */
};

struct ggroup_move {
	__u64 id;
	__u64 parent;		/* id of a slice, or of the root, on the same GPU */
};

struct ggroup_id {
	__u64 id;
};

#define GGROUP_NOBODY		0xffffffffU	/* no owner: the slice was given to no user */

/* struct ggroup_books.flags */
#define GGROUP_BOOKS_ONLINE	0x1U	/* the GPU has a provider */
#define GGROUP_BOOKS_JOINED	0x2U	/* the process has a file that joined */
#define GGROUP_BOOKS_DEAD	0x4U	/* the process exited */
#define GGROUP_BOOKS_DETACHED	0x8U	/* acknowledged: its TSGs are off the runlist */
#define GGROUP_BOOKS_DOUBTFUL	0x10U	/* a provider failed at a lever, or went meanwhile */
#define GGROUP_BOOKS_DETACHED_GR	0x20U	/* with DETACHED: only those of the GR engine */

/* struct ggroup_books, struct ggroup_reasons: off_all, off_gr */
#define GGROUP_REASON_FREEZE	0x1U	/* it, or a slice above it, is frozen */
#define GGROUP_REASON_TURN	0x2U	/* another program has the turn */
#define GGROUP_REASON_QUOTA	0x4U	/* its time in this period is used up */
#define GGROUP_REASON_BUSY	0x8U	/* a latency-critical neighbour is at work */
#define GGROUP_REASON_GANG	0x10U	/* a peer that it works with has no turn */
#define GGROUP_REASON_MIGRATION	0x20U	/* it is being moved to another GPU */

/* What is known about a group at one moment. */
struct ggroup_books {
	__u64 id;		/* in */
	__u64 high;
	__u64 low;
	__u64 swap_max;
	__u64 current_bytes;	/* on the GPU, this group and everything below it */
	__u64 peak;		/* highest current_bytes since RESET_PEAK with this file */
	__u64 swap;		/* in the host, this group and everything below it */
	__u64 swapin_bytes;
	__u64 swapout_bytes;
	__u64 swapins;
	__u64 swapouts;
	__u64 move_usec;
	__u64 events_low;
	__u64 events_high;
	__u64 events_max;
	__u64 events_oom;
	__u64 events_reclaim;
	__u64 events_fail;
	__u64 timeslice_us;	/* asked for; 0 the default */
	__u64 pressure_bytes;	/* the latest record of usermemfd */
	__u64 pressure_seq;
	__u32 frozen;		/* asked for */
	__u32 priority;
	__u32 weight;
	__u32 kept;		/* a slice that stays without members */
	__u32 uid;		/* owner of a slice: controls what is below it; GGROUP_NOBODY */
	__u32 gid;		/* kept for the daemon, means nothing here; GGROUP_NOBODY */
	__u64 parent;		/* id of the group above, 0 for a root */
	__u64 lever_timeslice_us;	/* process: acknowledged by the provider; 0 the default */
	__u64 submitted;	/* process: what it wrote to its page of counters */
	__u64 finished;
	__u32 flags;		/* GGROUP_BOOKS_* */
	__u32 reserved;
	__u64 swap_peak;	/* as peak, of swap */
	__u64 peak_ever;	/* highest ever, regardless of resets */
	__u64 swap_peak_ever;
	__u32 off_all;		/* process: reasons to be off the runlist, on all engines */
	__u32 off_gr;		/* process: reasons that take the GR engine alone */
	__u64 quota_us;		/* work on the GPU in each period; GGROUP_MAX is no quota */
	__u64 period_us;
	__u64 limit_max;
	__u64 oom_group;	/* kept for the daemon, which kills */
	__u64 events_oom_kill;
	__u64 events_oom_group_kill;
	__u64 wait_max_us;	/* longest wait for a turn of memory; 0 the daemon's */
	__u64 spatial;		/* kept for the daemon, which runs the slice's MPS servers */
	__u64 sm_max;		/* SMs that kernels run on at most; 0 all */
	__u64 lever_sm_max;	/* process: acknowledged by the provider; 0 all */
};

/* struct ggroup_set.mask */
#define GGROUP_SET_HIGH		0x1ULL
#define GGROUP_SET_LOW		0x2ULL
#define GGROUP_SET_SWAP_MAX	0x4ULL
#define GGROUP_SET_TIMESLICE	0x8ULL
#define GGROUP_SET_FROZEN	0x10ULL
#define GGROUP_SET_PRIORITY	0x20ULL
#define GGROUP_SET_WEIGHT	0x40ULL
#define GGROUP_SET_KEPT		0x80ULL
#define GGROUP_SET_UID		0x100ULL
#define GGROUP_SET_GID		0x200ULL
#define GGROUP_SET_QUOTA	0x400ULL
#define GGROUP_SET_PERIOD	0x800ULL
#define GGROUP_SET_LIMIT_MAX	0x1000ULL
#define GGROUP_SET_OOM_GROUP	0x2000ULL
#define GGROUP_SET_WAIT_MAX	0x4000ULL
#define GGROUP_SET_SPATIAL	0x8000ULL
#define GGROUP_SET_SM_MAX	0x10000ULL

/* Fields that the mask does not name are ignored. */
struct ggroup_set {
	__u64 id;
	__u64 mask;
	__u64 high;		/* 0..GGROUP_MAX */
	__u64 low;		/* 0..GGROUP_MAX */
	__u64 swap_max;		/* 0..GGROUP_MAX */
	__u64 timeslice_us;	/* 0..GGROUP_MAX */
	__u32 frozen;		/* 0, 1 */
	__u32 priority;		/* 0..GGROUP_PRIORITY_MOST */
	__u32 weight;		/* 1..GGROUP_WEIGHT_MOST */
	__u32 kept;		/* 0, 1 */
	__u32 uid;		/* any but GGROUP_NOBODY */
	__u32 gid;		/* any but GGROUP_NOBODY */
	__u64 quota_us;		/* GGROUP_QUOTA_LEAST_US..GGROUP_MAX */
	__u64 period_us;	/* GGROUP_PERIOD_LEAST_US..GGROUP_PERIOD_MOST_US */
	__u64 limit_max;	/* 0..GGROUP_MAX */
	__u64 oom_group;	/* 0, 1 */
	__u64 wait_max_us;	/* 0..GGROUP_MAX */
	__u64 spatial;		/* 0, 1 */
	__u64 sm_max;		/* 0..GGROUP_MAX */
};

struct ggroup_amount {
	__u64 id;		/* 0: the caller's own group */
	__u64 nbytes;		/* 0..GGROUP_MAX */
	__u64 usec;		/* SWAP_OUT, SWAP_IN: time it took; else 0 */
};

/* struct ggroup_reset.what */
#define GGROUP_PEAK_GMEM	0	/* peak */
#define GGROUP_PEAK_SWAP	1	/* swap_peak */

struct ggroup_reset {
	__u64 id;
	__u32 what;		/* GGROUP_PEAK_* */
	__u32 reserved;
};

/* The whole set of reasons for which a process is off the runlist; replaces the previous set. */
struct ggroup_reasons {
	__u64 id;
	__u32 off_all;		/* GGROUP_REASON_*: those that take all engines */
	__u32 off_gr;		/* GGROUP_REASON_*: those that take the GR engine alone */
};

/* struct ggroup_note.event */
#define GGROUP_EVENT_LOW	0
#define GGROUP_EVENT_HIGH	1
#define GGROUP_EVENT_MAX	2	/* MAX and OOM: by NOTE for a limit_max alone */
#define GGROUP_EVENT_OOM	3
#define GGROUP_EVENT_RECLAIM	4
#define GGROUP_EVENT_FAIL	5
#define GGROUP_EVENT_OOM_KILL	6	/* this and the next: with GGROUP_SET_LIMIT_MAX */
#define GGROUP_EVENT_OOM_GROUP_KILL	7

struct ggroup_note {
	__u64 id;
	__u32 event;		/* GGROUP_EVENT_* */
	__u32 reserved;
};

/* struct ggroup_target.flags */
#define GGROUP_TARGET_BELOW_LOW	0x1U	/* goes below its effective low: no other group had more */

/* How much to take from one process. */
struct ggroup_target {
	__u64 id;
	__u64 nbytes;
	__u32 flags;		/* GGROUP_TARGET_* */
	__u32 reserved;
};

struct ggroup_plan {
	__u64 id;		/* in: group to take from, or from below */
	__u64 nbytes;		/* in: bytes to take */
	__u64 targets;		/* in: address of an array of struct ggroup_target */
	__u32 capacity;		/* in: targets that fit in the array */
	__u32 count;		/* out: targets in all; ENOSPC if they do not fit */
};

/* struct ggroup_use.next: the greater, the farther. The range is wider than needed so far. */
#define GGROUP_NEXT_USE_SOON	0		/* also if nothing was set */
#define GGROUP_NEXT_USE_MOST	255
#define GGROUP_NEXT_USE_S	30		/* seconds for which it applies */
#define GGROUP_USES_MOST	1024		/* processes in one call */

/* How soon a process uses its memory again. */
struct ggroup_use {
	__u64 id;		/* a process; one that no longer exists is skipped */
	__u32 next;		/* 0..GGROUP_NEXT_USE_MOST */
	__u32 reserved;
};

struct ggroup_uses {
	__u64 root;		/* id of the root of their GPU */
	__u64 uses;		/* address of an array of struct ggroup_use */
	__u32 count;		/* entries in it, at most GGROUP_USES_MOST */
	__u32 reserved;
};

/* struct ggroup_command.value of DETACH_TSG, and the fourth word of its message */
#define GGROUP_ENGINES_ALL	0
#define GGROUP_ENGINES_GR	1	/* graphics and compute alone */

struct ggroup_command {
	__u64 id;		/* in: a process; RECLAIM: any group */
	__u64 value;		/* SET_TIMESLICE: us, 0 the default */
				/* SET_SM_MAX: SMs, 0 all; RECLAIM: bytes; out: moved */
				/* DETACH_TSG: GGROUP_ENGINES_* */
	__u32 timeout_ms;	/* in: 0 for GGROUP_TIMEOUT_MS; at most GGROUP_TIMEOUT_MS_MOST */
	__u32 reserved;
};

struct ggroup_join {
	char uuid[GGROUP_UUID_LEN];	/* in */
	__u64 root;		/* out */
	__u64 id;		/* out: the group of this process on this GPU */
	__u32 timeout_ms;	/* in: for the provider, as in struct ggroup_command */
	__u32 reserved;
};

/* A new file descriptor on a group. */
struct ggroup_fd {
	__u64 id;		/* in: USERMEM: a group, 0 the caller's own. EVENTS: a root */
	__u32 flags;		/* in: O_CLOEXEC, O_NONBLOCK */
	__s32 fd;		/* out */
};

/* struct ggroup_event.channel */
#define GGROUP_CHANNEL_GMEM	1	/* one of the events_* counts changed */
#define GGROUP_CHANNEL_USERMEM	2	/* there is a new record of usermemfd */
#define GGROUP_CHANNEL_EXIT	3	/* the process exited */
#define GGROUP_CHANNEL_SET	4	/* a process that is not the provider has SET something */

/*
 * An event, as read() on the descriptor of EVENTS gives it: as many as fit; EAGAIN without one if
 * O_NONBLOCK, EINVAL for a buffer too short for one. Unread events of one group and channel are
 * merged and counted: so there are at most four per group, and their causes never wait. poll()
 * gives EPOLLIN.
 */
struct ggroup_event {
	__u64 id;
	__u32 channel;		/* GGROUP_CHANNEL_* */
	__u32 count;		/* at least 1; stays at 2^32 - 1 */
};

/*
 * A record, as read() on a usermemfd gives it: the latest one, once for each descriptor. Records
 * from before the descriptor was opened are not seen. EAGAIN without one if O_NONBLOCK, ENODEV
 * when the group is gone; poll() gives EPOLLIN, and EPOLLHUP when the group is gone.
 */
struct ggroup_pressure {
	__u64 nbytes;		/* to give back */
	__u64 seq;		/* of the record, from 1 */
};

/*
 * The page of counters: mmap() of a file that joined, at offset 0, one page, shared. The process
 * alone writes it, and both counters only grow. They are the process's own claims. A child does
 * not inherit the mapping, whatever it asks of madvise().
 */
struct ggroup_counters {
	__u64 submitted;	/* kernels launched */
	__u64 finished;		/* kernels completed */
	__u64 reserved[6];
};

/*
 * One message between the kernel and a provider: the format of backend/door/wire.py.
 *
 *	command		args in				args out
 *	ARRIVE		id 0, pid, start		none: it wants to join; answer after ADD,
 *							or at once where it has a group
 *	SET_TIMESLICE	id, pid, start, microseconds	none
 *	SET_SM_MAX	id, pid, start, SMs		none
 *	ATTACH_TSG	id, pid, start			none
 *	DETACH_TSG	id, pid, start, GGROUP_ENGINES_*	none: answer when no TSG of
 *							them runs, and all others
 *							are on the runlist
 *	RECLAIM		id, pid, start, bytes		bytes moved, at most GGROUP_MAX
 *
 * An answer is the message with GGROUP_MESSAGE_REPLY in op, the same seq, status 0 or a negated
 * errno, and args out. write() takes whole messages, and refuses an answer to nothing with EINVAL.
 * An unread command is replaced by a later one to the same lever of the same process; the callers
 * of both get the answer. A provider that does not know GGROUP_ENGINES_GR takes all engines off,
 * which stops GR as well.
 */
struct ggroup_message {
	__u32 op;		/* GGROUP_OP_*, and GGROUP_MESSAGE_REPLY in an answer */
	__s32 status;
	__u64 seq;
	__u32 gpu;		/* 0 */
	__u32 flags;		/* 0 */
	__u64 args[5];
};

#define GGROUP_MESSAGE_REPLY	0x80000000U

#define GGROUP_OP_ARRIVE	16
#define GGROUP_OP_SET_TIMESLICE	17
#define GGROUP_OP_ATTACH_TSG	18
#define GGROUP_OP_DETACH_TSG	19
#define GGROUP_OP_RECLAIM	20
#define GGROUP_OP_SET_SM_MAX	27

#define GGROUP_IOC_MAGIC	0xe9

/* Every process. */
#define GGROUP_IOC_HELLO	_IOR(GGROUP_IOC_MAGIC, 0, struct ggroup_hello)

/*
 * Tenants, on their own group; with CAP_SYS_ADMIN on any process, and USERMEM and GET on any group
 * that the caller controls. All but JOIN, USERMEM and GET: EINVAL for a group that is no process.
 *
 * JOIN: binds this file to the caller's process. Where no other file of the process is bound, the
 *   provider is told (ARRIVE), and makes a group if there is none yet. ENODEV without GPU or
 *   provider, ETIMEDOUT, EBUSY for a file that is bound or registered already, and whatever the
 *   provider answers.
 * CHARGE: ENOMEM, see above. Over a limit_max: for the caller's own group, memory is reclaimed and
 *   waited for, and ENOMEM says that this was in vain. For another group, EAGAIN if enough could
 *   leave that level: the caller is the provider, or has one, and reclaims and charges again.
 * UNCHARGE, UNCHARGE_SWAP: EINVAL for more than the group holds.
 * SWAP_OUT: ENOSPC over some swap_max, EINVAL for more than the group holds.
 * SWAP_IN: EAGAIN if that would put some level over its high, or its limit_max, EINVAL for more
 *   than the group has in the host.
 *   Both: on the caller's own group EINVAL for 0 bytes. The statistics count only possible bytes
 *   and usec: at most 1 TB/s since the group was made, and no more time than has passed since.
 * USERMEM: a descriptor of struct ggroup_pressure. EMFILE.
 * GET: the books of a group that the caller has a right to, all as of one moment.
 */
#define GGROUP_IOC_JOIN		_IOWR(GGROUP_IOC_MAGIC, 1, struct ggroup_join)
#define GGROUP_IOC_CHARGE	_IOW(GGROUP_IOC_MAGIC, 2, struct ggroup_amount)
#define GGROUP_IOC_UNCHARGE	_IOW(GGROUP_IOC_MAGIC, 3, struct ggroup_amount)
#define GGROUP_IOC_UNCHARGE_SWAP _IOW(GGROUP_IOC_MAGIC, 4, struct ggroup_amount)
#define GGROUP_IOC_SWAP_OUT	_IOW(GGROUP_IOC_MAGIC, 5, struct ggroup_amount)
#define GGROUP_IOC_SWAP_IN	_IOW(GGROUP_IOC_MAGIC, 6, struct ggroup_amount)
#define GGROUP_IOC_USERMEM	_IOWR(GGROUP_IOC_MAGIC, 7, struct ggroup_fd)
#define GGROUP_IOC_GET		_IOWR(GGROUP_IOC_MAGIC, 8, struct ggroup_books)

/*
 * Control. The next owner of a slice above may FIND, SET, RESET_PEAK, PLAN, PRESS and RECLAIM.
 *
 * ADD: in root, parent, kind SLICE with path or PROCESS with pid and start; out id. EEXIST, then
 *   ENODEV without parent, EXDEV for a parent on another GPU, EINVAL for one that is a process,
 *   ESRCH for a process that is not alive, ENOSPC for too many, EAGAIN for too many of one user
 *   or too deep.
 * FIND: in root, kind and path, or pid and start; out id and parent. Without CAP_SYS_ADMIN EPERM
 *   also for a group that does not exist.
 * NEXT: in root, id; out the group with the next greater id on that GPU or, with root 0, the next
 *   root. ENOENT after the last.
 * MOVE: moves its charges along. EINVAL for a root, for a parent that is a process, on
 *   another GPU, or below the group; EAGAIN for too deep.
 * REMOVE: takes its charges off every group above. EBUSY for a root, or with children.
 * SET: writes the books and moves nothing. The listener to EVENTS is told, unless the provider made
 *   the call: ggroupfs then moves the levers, and reclaims memory over a lower high. Without a
 *   listener, a lower high is seen by the next charge of a tenant at or below the group, which
 *   wakes reclaim. Priority and weight are only stored, for a scheduler: they move no lever. EPERM
 *   for a root, ERANGE. KEPT and OWNER are for slices, EINVAL otherwise.
 * RESET_PEAK: peak starts again at current_bytes, or swap_peak at swap, only for GET with this
 *   file. EMFILE if GGROUP_RESETS_MOST files of users other than root have reset one of the group.
 * OBSERVE: the driver says that the process holds nbytes; the books follow, whatever the limits
 *   say.
 * NOTE: counts an event here and in every group above. EINVAL for an unknown event; without
 *   GGROUP_SET_LIMIT_MAX among the settings of HELLO also for MAX and OOM, which only the kernel
 *   then counts, MAX for a charge that a swap_max refuses.
 * PRESS: a record for usermemfd.
 * PLAN: targets to take nbytes from: memory not protected by low first, then, marked
 *   GGROUP_TARGET_BELOW_LOW, protected memory. Within each, the farthest next use goes first;
 *   within one class the largest process, until they are level. Less in all if swap_max allows no
 *   more.
 * SET_TIMESLICE, SET_SM_MAX, ATTACH_TSG, DETACH_TSG: of a process; return once the provider has
 *   acknowledged.
 *   A state already reached is not commanded again. DETACH_TSG takes the TSGs of GGROUP_ENGINES_*
 *   off the runlist, and puts those of other engines on it; without GGROUP_FEATURE_REASONS, those
 *   of all engines are taken off.
 * RECLAIM: of a process, as much as the provider can move; of a slice or root, by a plan, with
 *   events and records for usermemfd as for a tenant's charge. A process that cannot give memory is
 *   skipped; the provider's error is returned only if none has given any. ETIMEDOUT, EINTR and
 *   ENODEV end the plan and are returned whatever has moved by then: later processes were not
 *   asked.
 * These five: ETIMEDOUT, ENODEV without a provider or when it dies, ESRCH for a process that
 *   exited, EINTR, and whatever the provider answers.
 * REASONS: the whole set of reasons for which a process is off the runlist. Writes the books, moves
 *   nothing, and tells the listener as SET does. EINVAL for a group that is no process, for bits
 *   other than GGROUP_REASON_*, and for a bit that is in both masks.
 * NEXT_USE: how soon processes of one GPU use their memory again. Moves nothing and tells no
 *   listener. EINVAL for a group that is no root, for too many uses, and for a use of a group that
 *   is no process on that GPU, or with an invalid class: then nothing is recorded.
 */
#define GGROUP_IOC_ADD		_IOWR(GGROUP_IOC_MAGIC, 16, struct ggroup_group)
#define GGROUP_IOC_FIND		_IOWR(GGROUP_IOC_MAGIC, 17, struct ggroup_group)
#define GGROUP_IOC_NEXT		_IOWR(GGROUP_IOC_MAGIC, 18, struct ggroup_group)
#define GGROUP_IOC_MOVE		_IOW(GGROUP_IOC_MAGIC, 19, struct ggroup_move)
#define GGROUP_IOC_REMOVE	_IOW(GGROUP_IOC_MAGIC, 20, struct ggroup_id)
#define GGROUP_IOC_SET		_IOW(GGROUP_IOC_MAGIC, 21, struct ggroup_set)
#define GGROUP_IOC_RESET_PEAK	_IOW(GGROUP_IOC_MAGIC, 22, struct ggroup_reset)
#define GGROUP_IOC_OBSERVE	_IOW(GGROUP_IOC_MAGIC, 23, struct ggroup_amount)
#define GGROUP_IOC_NOTE		_IOW(GGROUP_IOC_MAGIC, 24, struct ggroup_note)
#define GGROUP_IOC_PRESS	_IOW(GGROUP_IOC_MAGIC, 25, struct ggroup_amount)
#define GGROUP_IOC_PLAN		_IOWR(GGROUP_IOC_MAGIC, 26, struct ggroup_plan)
#define GGROUP_IOC_SET_TIMESLICE _IOW(GGROUP_IOC_MAGIC, 27, struct ggroup_command)
#define GGROUP_IOC_ATTACH_TSG	_IOW(GGROUP_IOC_MAGIC, 28, struct ggroup_command)
#define GGROUP_IOC_DETACH_TSG	_IOW(GGROUP_IOC_MAGIC, 29, struct ggroup_command)
#define GGROUP_IOC_RECLAIM	_IOWR(GGROUP_IOC_MAGIC, 30, struct ggroup_command)
#define GGROUP_IOC_REASONS	_IOW(GGROUP_IOC_MAGIC, 31, struct ggroup_reasons)
#define GGROUP_IOC_NEXT_USE	_IOW(GGROUP_IOC_MAGIC, 32, struct ggroup_uses)
#define GGROUP_IOC_SET_SM_MAX	_IOW(GGROUP_IOC_MAGIC, 33, struct ggroup_command)

/*
 * GPUs.
 *
 * REGISTER: EBUSY if the GPU has a provider, or the file is bound or registered already;
 *   ENOSPC for too many GPUs.
 * UNREGISTER: as closing the file, but also says what only a provider can know (flags). EINVAL on
 *   a file that is no provider.
 * FORGET: closes the books of a GPU by its UUID. EBUSY while it has a provider.
 * EVENTS: the stream of one GPU's events. EBUSY if it is open already. The stream ends
 *   with the GPU: ENODEV, EPOLLHUP.
 */
#define GGROUP_IOC_REGISTER	_IOWR(GGROUP_IOC_MAGIC, 48, struct ggroup_gpu)
#define GGROUP_IOC_UNREGISTER	_IOW(GGROUP_IOC_MAGIC, 49, struct ggroup_unregister)
#define GGROUP_IOC_FORGET	_IOW(GGROUP_IOC_MAGIC, 50, struct ggroup_gpu)
#define GGROUP_IOC_EVENTS	_IOWR(GGROUP_IOC_MAGIC, 51, struct ggroup_fd)

#endif /* _UAPI_GGROUP_H */
