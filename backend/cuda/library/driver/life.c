// SPDX-License-Identifier: Apache-2.0
#include "life.h"

/* The section of parts; set by the linker. */
extern const struct life *const __start_ggroup_life[] __attribute__((visibility("hidden")));
extern const struct life *const __stop_ggroup_life[] __attribute__((visibility("hidden")));

/* Head of a loop over the parts that handle an event, stage by stage. */
#define EACH(part, event)										\
	for (enum life_stage stage = 0; stage < LIFE_STAGES; stage++)					\
		for (const struct life *const *part = __start_ggroup_life; part < __stop_ggroup_life; part++)	\
			if ((*part)->stage == stage && (*part)->event)

CUresult life_set_up(struct device *device)
{
	CUresult result = CUDA_SUCCESS;

	EACH(part, set_up)
		if (result == CUDA_SUCCESS)
			result = (*part)->set_up(device);
	return result;
}

void life_known(struct device *device)
{
	EACH(part, known)
		(*part)->known(device);
}

void life_context_used(struct device *device, CUcontext context)
{
	EACH(part, context_used)
		(*part)->context_used(device, context);
}

void life_context_gone(struct device *device, CUcontext context)
{
	EACH(part, context_gone)
		(*part)->context_gone(device, context);
}

void life_forget(void)
{
	EACH(part, forget)
		(*part)->forget();
}
