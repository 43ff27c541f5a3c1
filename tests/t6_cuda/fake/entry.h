/* SPDX-License-Identifier: Apache-2.0 */
/* What cuGetProcAddress knows; table.c is written by table.py. */
#ifndef FAKE_ENTRY_H
#define FAKE_ENTRY_H

#include "fake.h"

struct fake_entry {
	const char *base;	/* without _v2, _ptsz */
	int since;
	bool per_thread;
	void *pointer;
};

extern const struct fake_entry fake_entries[];

#endif
