/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The messages of backend/door/wire.py, and the descriptors that they go through.
 *
 * A program may close descriptors that it does not know (closefrom(3)) and get the same number for
 * a file of its own. So each is known by its inode too, and is left alone once it is another's.
 */
#ifndef GGROUP_CUDA_LINK_H
#define GGROUP_CUDA_LINK_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct message {
	uint32_t op;
	int32_t status;
	uint64_t seq;
	uint32_t gpu;
	uint32_t flags;
	uint64_t args[5];
};

enum { WIRE_VERSION = 1 };

/* What a side can do, in HELLO and in its answer: Feature of backend/door/wire.py, which says what each means. */
#define FEATURE_MEMORY		(UINT64_C(1) << 0)
#define FEATURE_COUNTERS	(UINT64_C(1) << 1)
#define FEATURE_REPORT		(UINT64_C(1) << 2)
#define FEATURE_DEPART		(UINT64_C(1) << 3)
#define FEATURE_FAMILY		(UINT64_C(1) << 5)
#define FEATURE_TURNS		(UINT64_C(1) << 6)
#define FEATURE_TOTAL		(UINT64_C(1) << 7)
#define FEATURE_BURSTS		(UINT64_C(1) << 8)
#define FEATURE_HOST		(UINT64_C(1) << 9)
#define FEATURE_SETS		(UINT64_C(1) << 10)
#define FEATURE_VIEW		(UINT64_C(1) << 11)
#define FEATURE_MANAGED		(UINT64_C(1) << 12)
#define FEATURE_SPACE		(UINT64_C(1) << 13)
#define FEATURE_SMS		(UINT64_C(1) << 14)
/* Of a daemon that says 0: what 0.1 could. */
#define FEATURES_FIRST		(FEATURE_MEMORY | FEATURE_COUNTERS | FEATURE_REPORT | FEATURE_DEPART)
#define FEATURES										\
	(FEATURES_FIRST | FEATURE_FAMILY | FEATURE_TURNS | FEATURE_TOTAL | FEATURE_BURSTS |	\
	 FEATURE_HOST | FEATURE_SETS | FEATURE_VIEW | FEATURE_MANAGED | FEATURE_SPACE | FEATURE_SMS)

enum op {
	OP_HELLO = 1,
	OP_LOCATE = 4,
	OP_MANAGE,
	OP_CHARGE,
	OP_UNCHARGE,
	OP_MOVE_IN,
	OP_LIMITS,
	OP_REPORT,
	OP_WANT = 12,
	OP_FAMILY,
	OP_TOTAL,
	OP_HOST,
	OP_RECLAIM = 20,
	OP_DEPART,
	OP_END_TURN,
	OP_BEGIN_TURN,
	OP_PREPARE,
	OP_SPACE,
	OP_SMS,
	OP_EVENTS = 64,		/* from here on no answer is waited for */
	OP_ROOM = 66,
	OP_LEAD,
	OP_FOLLOW,
	OP_GRANT,
};
#define OP_REPLY (UINT32_C(1) << 31)

struct descriptor {
	int fd;		/* -1: none */
	dev_t device;
	ino_t inode;
};

#define NO_DESCRIPTOR ((struct descriptor){ .fd = -1 })

/* Whether it is still what it was. */
bool link_ours(const struct descriptor *descriptor);
/* Closes it, if it is. */
void link_drop(struct descriptor *descriptor);

/* A connection to the socket at `path`, not blocking, closed by exec: 0 or an
 * errno, EPERM if neither root nor this user listens there. Never waits. */
int link_open(struct descriptor *link, const char *path);
/* A pipe to wake up a thread that sleeps in poll(2); each end on its own. */
int link_pipe(struct descriptor ends[2]);
/* 0, EAGAIN, or another errno: the connection is of no use any more. Never waits, and
 * never raises SIGPIPE. */
int link_send(const struct descriptor *link, const struct message *message);
/* The same; `fd` becomes a descriptor that came along, -1 without one. Where more than one came, all are
 * closed, and it is EPROTO. */
int link_receive(const struct descriptor *link, struct message *message, int *fd);

#endif
