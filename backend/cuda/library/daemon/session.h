/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the parts of daemon.h share: session.c has the connection and which request waits for what, listener.c the
 * thread, contact.c what that does to have a connection, command.c what it does for the daemon, daemon.c what the
 * others of the library ask for.
 *
 * What the daemon was told of each device is kept here too (struct managed), apart from what the allocator
 * counts: a daemon that comes later, or again, is told exactly that (MANAGE), so the two never drift apart.
 * Figures change, and the message about it goes out, under one lock; so messages are in the order of what
 * they tell.
 */
#ifndef GGROUP_CUDA_SESSION_H
#define GGROUP_CUDA_SESSION_H

#include <sys/un.h>

#include "device.h"
#include "link.h"

/* Milliseconds. */
#define ANSWER 15000		/* for an answer of the daemon; then we go on without it */
#define GREETING 2000
#define MOVE_BACK 250		/* between two tries to get memory back */

#define COMMANDS 64

struct managed {
	struct device *device;
	uint64_t resident, swapped;	/* as the daemon knows them, or is to know them */
	uint64_t freed_resident, freed_swapped;	/* not told yet: the socket was full */
	uint64_t foreign, exchanged, away, intact, lent;	/* as in struct device, told or to be told */
	bool report;
	uint64_t held, used, wanted, clean;	/* ... of the host */
	uint64_t unified;	/* ... that is managed memory */
	bool report_host;
	bool granted;		/* it has said what may be had of the host, which is not passed on yet: */
	uint64_t grant;
	bool tried;		/* a thread that waits in daemon_manage waits no longer */
	bool ours;		/* the daemon that we are connected to manages it */
	bool strange;		/* ... or does not know it */
	uint64_t room;		/* it said that so much may come back */
};

/* A request that is waited for. */
struct waiter {
	struct waiter *next;
	struct managed *managed;
	struct message message;	/* the request, then the answer */
	int fd;			/* that came with it */
	bool done;
	bool lost;		/* there will be no answer */
};

struct session {
	pthread_mutex_t lock;		/* of all that follows */
	pthread_cond_t changed;
	bool running;			/* there is a thread */
	bool broken;			/* the connection is to be given up */
	bool clogged;			/* a thread waits for room in the socket */
	char path[sizeof(((struct sockaddr_un *)NULL)->sun_path)];
	struct descriptor socket;
	struct descriptor pipe[2];	/* wakes the thread */
	uint64_t features;		/* that the daemon that we are connected to has, too */
	uint64_t last_seq;
	struct waiter *waiters;
	struct managed managed[GG_DEVICES];
	int managed_count;
	/* Of the listening thread alone. */
	struct message commands[COMMANDS];
	int command_fds[COMMANDS];	/* that came with them; -1: none */
	int command_count;
	int64_t next_try, next_move, lost_at;
	int64_t departed_at;
	uint64_t moved_in_us;		/* not told yet */
};

extern struct session session;
/* In the listening thread. */
extern __thread bool session_listening;

static inline uint64_t at_most(uint64_t amount, uint64_t most)
{
	return amount < most ? amount : most;
}

int64_t session_now_ms(void);
void session_wake(void);	/* without the lock too */

/* All that follows: with the lock. */

/* Waits for something to change; false after the moment `until`. */
bool session_wait(int64_t until);
struct managed *session_find(const struct device *device);
struct managed *session_find_index(uint32_t index);
/* Launches count on the line of that number. */
void session_number(struct managed *managed, int index);

struct message session_about(enum op op, const struct managed *managed, uint64_t first, uint64_t second);
/* Sends a message, and before it what was freed and not told; 0, or EAGAIN for a socket that is full.
 * Whatever else it is, the connection is given up. */
int session_say(struct managed *managed, const struct message *message);
/* ... what was not told alone. */
int session_flush(struct managed *managed);
/* Notes what is to be reported now, if anything of it is another than was. */
void session_note(struct managed *managed);
/* Asks and waits, in a thread of the program; false without an answer. */
bool session_ask(struct waiter *waiter);
/* ... in the listening thread, which goes on receiving meanwhile, and calls `work`, without the lock, for
 * what it is asked to do; NULL: it is in the middle of a move, and that waits. */
bool session_ask_listening(struct waiter *waiter, int64_t ms, void (*work)(void));

/* Takes what has come, by the listening thread. */
void session_drain(void);
/* Sleeps until there is something to do, `timeout` ms at most: without the lock. */
void session_sleep(int64_t timeout);
/* ... `us` microseconds at most, and leaves that to be taken; whether there is. By the listening thread, without the
 * lock. */
bool session_stirs(unsigned int us);

#endif
