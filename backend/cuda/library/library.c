// SPDX-License-Identifier: Apache-2.0
#include "library.h"

#include <pthread.h>

#include "device.h"
#include "driver.h"
#include "hook.h"
#include "life.h"
#include "nvml.h"
#include "ours.h"
#include "sight.h"
#include "space.h"

bool library_ready;

/* Runs in the only thread of a forked child. Locks may have been held by threads that the child does not have. */
static void in_child(void)
{
	driver_forget();
	nvml_forget();
	hook_forget();
	sight_forget();	/* NVML alone may have asked */
	space_forget();
	ours_depth = 0;
	if (!library_ready)	/* nothing was used yet: a shell, for example, forks all the time */
		return;
	device_forget();
	life_forget();
	library_ready = false;
}

/* As the library is loaded, not at the first call: one thread may fork while another makes that. */
__attribute__((constructor)) static void look_for_children(void)
{
	pthread_atfork(NULL, NULL, in_child);
}

void library_begin_slowly(void)
{
	/* A constructor of libcuda, or of what it loads, may call an entry point: that call passes. */
	if (ours_inside())
		return;
	ours_enter();
	driver_open();
	__atomic_store_n(&library_ready, true, __ATOMIC_RELEASE);
	ours_leave();
}
