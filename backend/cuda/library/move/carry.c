// SPDX-License-Identifier: Apache-2.0
#include "carry.h"

#include "driver.h"
#include "moment.h"
#include "quiet.h"
#include "turn.h"

#include <string.h>
#include <time.h>

#define LOOK_NS 20000

enum { OUT = MOVER_OUT, IN = MOVER_IN };

CUresult carry_prepare(struct device *device)
{
	struct mover *mover = device->mover;
	CUresult result = CUDA_SUCCESS;

	if (mover->made_in == device->contexts)
		return CUDA_SUCCESS;
	/* The earlier ones were destroyed with their context. */
	memset(mover->stream, 0, sizeof(mover->stream));
	memset(mover->event, 0, sizeof(mover->event));
	for (int i = 0; i < MOVER_STREAMS && result == CUDA_SUCCESS; i++)
		result = real.cuStreamCreate(&mover->stream[i], CU_STREAM_NON_BLOCKING);
	if (result == CUDA_SUCCESS)
		mover->made_in = device->contexts;
	for (int i = 0; i < MOVER_STREAMS && result != CUDA_SUCCESS; i++)
		if (mover->stream[i])
			real.cuStreamDestroy_v2(mover->stream[i]);
	return result;
}

bool carry_idle(struct device *device)
{
	for (int i = 0; i < MOVER_STREAMS; i++)
		if (!quiet_ended(device->mover->stream[i]))
			return false;
	return true;
}

static void pause_for_a_moment(void)
{
	nanosleep(&(struct timespec){ .tv_nsec = LOOK_NS }, NULL);
}

bool carry_awaits(struct device *device)
{
	const uint64_t until = moment_us() + device->mover->copy_us;
	bool is_idle;

	while (!(is_idle = carry_idle(device)) && moment_us() < until)
		pause_for_a_moment();
	return is_idle;
}

bool carry(struct device *device, struct batch *out, struct batch *in)
{
	struct lane *lanes = device->mover->lane;
	/* In a gap between two turns no thread waits for the gate: what has gone is freed as the next goes. */
	const bool frees = out && (in || (!out->within && turn_gap(device)));
	uint64_t none = UINT64_MAX, room = out && in ? 0 : UINT64_MAX, freed = 0;
	bool flies = true;

	lane_begin(&lanes[OUT], out);
	lane_begin(&lanes[IN], in);
	while (flies && !lanes[OUT].unsure && !lanes[IN].unsure) {
		bool any = false;

		while (lane_send(device, &lanes[OUT], &none))
			any = true;
		while (lane_send(device, &lanes[IN], &room))
			any = true;
		any |= lane_land(device, &lanes[OUT], frees ? in ? &room : &freed : NULL);
		any |= lane_land(device, &lanes[IN], NULL);
		flies = any || lane_flies(&lanes[OUT]) || lane_flies(&lanes[IN]);
		if (!any && flies)
			pause_for_a_moment();
	}
	return (!lanes[OUT].unsure && !lanes[IN].unsure) || carry_awaits(device);
}
