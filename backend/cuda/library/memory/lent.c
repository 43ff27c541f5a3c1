// SPDX-License-Identifier: Apache-2.0
#include "lent.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/kcmp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon.h"
#include "glibc.h"
#include "life.h"
#include "log.h"
#include "moment.h"

/* Milliseconds between two looks. */
#define LOOK_MS 250

/* Memory that the program has freed, and that lives on by a descriptor. */
struct lent {
	struct lent *next;
	struct device *device;
	uint64_t name, bytes;
	bool only;		/* reachable only by descriptors, as none was imported here; in device->lent */
};

/* Memory of which the program imported a descriptor that it had exported. */
struct import {
	struct import *next;
	uint64_t name;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct lent *lents;	/* under the lock */
static struct import *imports;	/* under the lock: one for each import that lives */
static bool any;		/* atomically: there are some in `lents` */
static uint64_t looked;		/* us; for the thread that ticks */

/* The set, and a file in it that is never closed: a set without it is not the library's, since programs close
 * descriptors that they do not know. Under the lock. */
static int set = -1, mark = -1;
static uint64_t base;		/* added to names: no other set has such numbers */

/* The content found in the set. */
struct found {
	struct entry {
		uint64_t name;
		int fd;		/* the descriptor's number when it was given */
	} *entries;
	size_t count;
	bool ours;		/* it is the set that the library made */
	bool known;		/* the content could be read */
};

static bool add_entry(struct found *found, uint64_t name, int fd)
{
	struct entry *bigger = found->count % 64 ? found->entries :
						   realloc(found->entries, (found->count + 64) * sizeof(*bigger));

	if (!bigger)
		return false;
	found->entries = bigger;
	found->entries[found->count++] = (struct entry){ name, fd };
	return true;
}

/* Read the set, with the lock held. A line of an entry: "tfd: 5 events: 19 data: 1f pos:0 ino:3d sdev:9"
 * (fs/eventpoll.c, ep_show_fdinfo()). */
static struct found look(void)
{
	struct found found = { .known = set < 0 };
	char path[64], *line = NULL;
	size_t room = 0;
	FILE *file;

	if (set < 0)
		return found;
	/* The thread's own: /proc/self shows none where the main thread has ended. */
	snprintf(path, sizeof(path), "/proc/thread-self/fdinfo/%d", set);
	file = fopen(path, "re");
	found.known = file || errno == ENOENT;	/* the set was closed */
	while (file && getline(&line, &room, file) >= 0) {
		const char *data = strncmp(line, "tfd:", 4) ? NULL : strstr(line, "data:");
		const uint64_t number = data ? strtoull(data + strlen("data:"), NULL, 16) : 0;

		if (data && number == base)
			found.ours = true;
		else if (data && !add_entry(&found, number - base, atoi(line + strlen("tfd:"))))
			found.known = false;
	}
	found.known = found.known && !(file && ferror(file));
	if (file)
		fclose(file);
	free(line);
	return found;
}

static bool has(const struct found *found, uint64_t name)
{
	for (size_t i = 0; found->ours && i < found->count; i++)
		if (found->entries[i].name == name)
			return true;
	return false;
}

/* With the lock held. */
static bool is_imported(uint64_t name)
{
	const struct import *import = imports;

	while (import && import->name != name)
		import = import->next;
	return import;
}

/* Return whether a descriptor is of an entry's file: of the `nth` entry under that number, in the order of the set
 * (kcmp(2); get_epoll_tfile_raw_ptr() of fs/eventpoll.c). */
static bool is_same(int fd, const struct entry *entry, unsigned int nth)
{
	struct kcmp_epoll_slot slot = { .efd = (__u32)set, .tfd = (__u32)entry->fd, .toff = nth };

	return !syscall(SYS_kcmp, getpid(), getpid(), KCMP_EPOLL_TFD, fd, &slot);
}

/* Return whether an entry of that number exists for exactly the file that has it now: it is set to its current
 * value. */
static bool is_there(const struct entry *entry)
{
	struct epoll_event event = { .events = 0, .data.u64 = base + entry->name };

	return !epoll_ctl(set, EPOLL_CTL_MOD, entry->fd, &event);
}

/* Return the name under which a descriptor was given, or is `held`; 0 for none. With the lock held. */
static uint64_t match(const struct found *found, int fd, bool held)
{
	const struct entry *only = NULL;
	unsigned int under = 0;

	for (size_t i = 0; found->ours && i < found->count; i++) {
		const struct entry *entry = &found->entries[i];
		unsigned int nth = 0;

		for (size_t k = 0; k < i; k++)
			nth += found->entries[k].fd == entry->fd;
		if ((entry->name == LENT_HELD) == held && is_same(fd, entry, nth))
			return entry->name;
		under += entry->fd == fd;
		only = entry->fd == fd ? entry : only;
	}
	/* Where the kernel does not tell, the only entry under that number is taken. */
	return under == 1 && (only->name == LENT_HELD) == held && is_there(only) ? only->name : 0;
}

static bool is_equal(const struct found *found, const struct found *other)
{
	bool equal = found->ours == other->ours && found->count == other->count;

	for (size_t i = 0; equal && i < found->count; i++)
		equal = found->entries[i].name == other->entries[i].name &&
			found->entries[i].fd == other->entries[i].fd;
	return equal;
}

/* Return that of the set as it is. A descriptor that another process closes takes its entry out of the set, and another
 * one has its place then: what was found counts only if nothing went meanwhile. Entries come only with the lock held,
 * so each round has fewer. */
static uint64_t name_of(int fd, bool held)
{
	struct found found = look(), after;
	uint64_t name;
	bool same;

	do {
		name = match(&found, fd, held);
		after = look();
		same = is_equal(&found, &after);
		free(found.entries);
		found = after;
	} while (!same);
	free(found.entries);
	return name;
}

static bool enter(int fd, uint64_t name)
{
	/* Nothing waits for it, and no event is requested. */
	struct epoll_event event = { .events = 0, .data.u64 = base + name };
	bool entered = !epoll_ctl(set, EPOLL_CTL_ADD, fd, &event);
	int other;

	if (entered || errno != EEXIST)
		return entered;
	/* The descriptor is of several pieces of memory. An entry is a file and a number, which may be closed
	 * afterwards. */
	other = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	entered = other >= 0 && enter(other, name);
	if (other >= 0)
		close(other);
	return entered;
}

/* With the lock held. */
static bool make_set(void)
{
	if (glibc_random(&base, sizeof(base), 0) != sizeof(base))
		return false;
	set = epoll_create1(EPOLL_CLOEXEC);
	mark = eventfd(0, EFD_CLOEXEC);
	if (set >= 0 && mark >= 0 && enter(mark, 0))
		return true;
	if (set >= 0)
		close(set);
	if (mark >= 0)
		close(mark);
	set = mark = -1;
	return false;
}

bool lent_give(uint64_t name, int fd)
{
	struct found found;
	bool given;

	pthread_mutex_lock(&lock);
	found = look();
	given = found.ours || (found.known && make_set());
	given = given && enter(fd, name);
	pthread_mutex_unlock(&lock);
	free(found.entries);
	if (!given)
		log_line("memory that is exported is not seen once it is freed here: descriptor %d", fd);
	return given;
}

int lent_hold(int fd)
{
	if (fd < 0 || lent_give(LENT_HELD, fd))
		return fd;
	close(fd);
	return -1;
}

void lent_let(int fd)
{
	if (fd < 0)
		return;
	pthread_mutex_lock(&lock);
	/* The program may have closed it, and have the number for another file, even for one that it exported. */
	if (name_of(fd, true))
		close(fd);
	pthread_mutex_unlock(&lock);
}

/* Update whether only other processes can reach the memory. Returns the device to report, or NULL. With the lock
 * held. */
static struct device *note(struct lent *lent)
{
	const bool only = !is_imported(lent->name);

	if (only == lent->only)
		return NULL;
	__atomic_add_fetch(&lent->device->lent, only ? lent->bytes : -lent->bytes, __ATOMIC_RELAXED);
	lent->only = only;
	return lent->device;
}

/* Do so for all memory of a name; several pieces of one device may have it. With the lock held. */
static struct device *note_all(uint64_t name)
{
	struct device *device = NULL, *changed;

	for (struct lent *lent = lents; lent; lent = lent->next)
		if (lent->name == name && (changed = note(lent)))
			device = changed;
	return device;
}

uint64_t lent_import(int fd)
{
	struct import *import = malloc(sizeof(*import));
	struct device *device = NULL;
	uint64_t name;

	if (!import)
		return 0;
	pthread_mutex_lock(&lock);
	name = name_of(fd, false);
	if (name) {
		*import = (struct import){ imports, name };
		imports = import;
		device = note_all(name);
	}
	pthread_mutex_unlock(&lock);
	if (!name)
		free(import);
	if (device)
		daemon_report(device);
	return name;
}

void lent_import_over(uint64_t name)
{
	struct device *device;
	struct import *import;

	pthread_mutex_lock(&lock);
	for (struct import **at = &imports; (import = *at); at = &import->next)
		if (import->name == name) {
			*at = import->next;
			break;
		}
	device = note_all(name);
	pthread_mutex_unlock(&lock);
	free(import);
	if (device)
		daemon_report(device);
	lent_sweep();
}

bool lent_keep(struct device *device, uint64_t name, uint64_t bytes)
{
	struct lent *lent = device && bytes ? malloc(sizeof(*lent)) : NULL;
	struct found found;
	bool kept;

	if (!lent)
		return false;
	*lent = (struct lent){ .device = device, .name = name, .bytes = bytes };
	pthread_mutex_lock(&lock);
	found = look();
	kept = !found.known || has(&found, name) || is_imported(name);	/* an unreadable set is read again later */
	if (kept) {
		lent->next = lents;
		lents = lent;
		__atomic_store_n(&any, true, __ATOMIC_RELAXED);
		__atomic_add_fetch(&device->foreign, bytes, __ATOMIC_RELAXED);
		note(lent);
	}
	pthread_mutex_unlock(&lock);
	free(found.entries);
	if (kept)
		daemon_report(device);
	else
		free(lent);
	return kept;
}

/* Take the memory of which no descriptor is open any more. It is out of the library's books by then: an allocation may
 * be waiting for another thread's sweep to find none left. */
static struct lent *take_gone(void)
{
	struct lent *gone = NULL, *lent;
	struct found found;

	pthread_mutex_lock(&lock);
	found = look();
	for (struct lent **at = &lents; found.known && (lent = *at);) {
		if (has(&found, lent->name) || is_imported(lent->name)) {
			at = &lent->next;
			continue;
		}
		__atomic_sub_fetch(&lent->device->lent, lent->only ? lent->bytes : 0, __ATOMIC_RELAXED);
		__atomic_sub_fetch(&lent->device->foreign, lent->bytes, __ATOMIC_RELAXED);
		__atomic_sub_fetch(&lent->device->resident, lent->bytes, __ATOMIC_RELAXED);
		*at = lent->next;
		lent->next = gone;
		gone = lent;
	}
	__atomic_store_n(&any, lents != NULL, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&lock);
	free(found.entries);
	return gone;
}

bool lent_sweep(void)
{
	struct lent *gone, *lent;
	bool some;

	if (!__atomic_load_n(&any, __ATOMIC_ACQUIRE))
		return false;
	gone = take_gone();
	some = gone != NULL;
	while ((lent = gone)) {
		gone = lent->next;
		daemon_uncharge(lent->device, lent->bytes, 0);
		daemon_report(lent->device);
		free(lent);
	}
	return some;
}

bool lent_any(void)
{
	lent_sweep();
	return __atomic_load_n(&any, __ATOMIC_RELAXED);
}

int64_t lent_tick(void)
{
	const uint64_t now = moment_us();

	if (!__atomic_load_n(&any, __ATOMIC_RELAXED))
		return -1;
	if (now - looked >= LOOK_MS * 1000) {
		looked = now;
		lent_sweep();
	}
	return LOOK_MS;
}

/* The parent's descriptors are of no concern to the child, which has none of the memory. */
static void forget(void)
{
	lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	lents = NULL;
	imports = NULL;
	any = false;
	set = mark = -1;
}

LIFE(.stage = LIFE_FOREIGN, .forget = forget);
