/* SPDX-License-Identifier: Apache-2.0 */
/* The table of cuGetProcAddress; table.c is written by table.py. */
#ifndef FAKE_ENTRY_H
#define FAKE_ENTRY_H

#include "fake.h"

struct fake_entry {
	const char *base;	/* name without _v2 and _ptsz */
	int since;
	bool per_thread;
	void *pointer;
};

extern const struct fake_entry fake_entries[];

#endif
