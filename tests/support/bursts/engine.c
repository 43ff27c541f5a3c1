/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Model of one engine with the real cost of a switch, programs that serve requests, and a filler, in virtual time;
 * engine.py wraps it for tests. The programs follow the library's own rules (hold.h, pace.h). All times are nanoseconds
 * unless stated otherwise.
 *
 * The engine is round robin: a context runs until its timeslice is over or it has no work. The next context pays for a
 * switch, unless it is the one that ran last.
 */
#include <stdlib.h>

#include "hold.h"
#include "pace.h"

#define US INT64_C(1000)
#define NEVER (INT64_C(1) << 62)
#define LEADERS_MOST 4
#define AHEAD_MOST 64		/* kernels, of a filler with unbounded run-ahead */

/* Times on an H200 and its host. */
#define SWITCH (197 * US)	/* engine time when another context gets the engine (docs/nvidia.md) */
#define LEAD_SLICE (60000 * US)
#define LAUNCH (8 * US)		/* from the call that launches a request until the engine has it */
#define RETURN (12 * US)	/* from the end of a request on the engine to the return of the call, and its word */
#define FILL (4 * US)		/* between two launches of the filler */
#define LATE (10 * US)		/* delay of a thread that waits for a time */
#define LOOK (50 * US + LATE)	/* between two looks of the filler at its run-ahead: LOOK_LEAST of turn.c */

struct context {
	int64_t timeslice, kernel;	/* `kernel`: duration of each kernel */
	int64_t queued, left;		/* kernels, and remaining time of the oldest */
	int64_t finished, busy, stays;
};

struct leader {
	struct context context;
	const int64_t *requests;
	int64_t *latencies;
	int64_t count, served, hold, until, next, periods;
	bool busy;		/* whether a request of it is on the GPU, by its word */
};

struct filler {
	struct context context;
	struct pace pace;
	struct allowance allowance;
	int64_t next, submitted, heard, held, since, more_us;
	uint64_t ahead_us, bound_us;
	bool sleeps, falls_back, fell_back, obeys;
};

struct model {
	struct leader leaders[LEADERS_MOST];
	struct filler filler;
	int count;
	bool fills;
	int64_t now, idle, left, switching;
	int on;			/* context that ran last, -1 for none; the filler's comes after those of the leaders */
};

struct model *model_new(void)
{
	struct model *model = calloc(1, sizeof(*model));

	if (model)
		model->on = -1;
	return model;
}

void model_free(struct model *model)
{
	free(model);
}

static void begin(struct leader *leader, int64_t now)
{
	int64_t arrival = leader->served < leader->count ? leader->requests[leader->served] : NEVER - LAUNCH;

	leader->next = (arrival > now ? arrival : now) + LAUNCH;
}

/* A program that serves requests, and holds others for `hold` after each; a negative `hold` means never. */
void model_lead(struct model *model, const int64_t *requests, int64_t count, int64_t service, int64_t hold,
		int64_t *latencies)
{
	struct leader *leader = &model->leaders[model->count++];

	leader->context = (struct context){ .timeslice = LEAD_SLICE, .kernel = service };
	leader->requests = requests;
	leader->latencies = latencies;
	leader->count = count;
	leader->hold = hold;
	begin(leader, 0);
}

/* A filler: launches kernels as fast as it may, and goes behind the others; with `ahead_us` 0 its run-ahead is
 * AHEAD_MOST kernels. If it does not obey, it reports that it is held, and launches all the same. */
void model_fill(struct model *model, int64_t kernel, uint64_t ahead_us, int64_t timeslice, bool obeys)
{
	model->filler.context = (struct context){ .timeslice = timeslice, .kernel = kernel };
	model->filler.ahead_us = ahead_us;
	model->filler.obeys = obeys;
	model->fills = true;
}

/* The engine */

static struct context *context_of(struct model *model, int at)
{
	return at < model->count ? &model->leaders[at].context : &model->filler.context;
}

static void queue(struct context *context)
{
	if (!context->queued++)
		context->left = context->kernel;
}

/* Puts the next context with work on the engine; false if none has work, and then the last one stays. */
static bool elect(struct model *model)
{
	const int all = model->count + model->fills;

	for (int i = 1; i <= all; i++) {
		int at = (model->on + i) % all;

		if (!context_of(model, at)->queued)
			continue;
		if (at != model->on) {
			model->on = at;
			model->switching = SWITCH;
			context_of(model, at)->stays++;
		}
		model->left = context_of(model, at)->timeslice;
		return true;
	}
	return false;
}

static int64_t least(int64_t one, int64_t other)
{
	return one < other ? one : other;
}

/* Runs to the end of the next kernel, at most to `until`. Returns its context, or -1 if `until` came first. */
static int advance(struct model *model, int64_t until)
{
	while (model->now < until) {
		struct context *on = model->on < 0 ? NULL : context_of(model, model->on);
		int64_t step;

		if (!model->switching && (!on || !on->queued || model->left <= 0) && !elect(model)) {
			model->idle += until - model->now;
			model->now = until;
			return -1;
		}
		on = context_of(model, model->on);
		step = least(model->switching ? model->switching : least(on->left, model->left), until - model->now);
		model->now += step;
		if (model->switching) {
			model->switching -= step;
			continue;
		}
		on->left -= step;
		on->busy += step;
		model->left -= step;
		if (!on->left) {
			on->queued--;
			on->finished++;
			on->left = on->kernel;
			return model->on;
		}
	}
	return -1;
}

/* The filler */

/* Returns the latest word, which is rewritten all the time while requests are pending. */
static int64_t word_of(const struct model *model, int64_t now)
{
	int64_t last = 0;

	for (int i = 0; i < model->count; i++) {
		const struct leader *leader = &model->leaders[i];
		int64_t word = leader->busy ? (int64_t)hold_word((uint64_t)now, true, 0) : leader->until;

		if (leader->hold >= 0 && word > last)
			last = word;
	}
	return last;
}

static int64_t held_for(struct model *model, int64_t now)
{
	struct filler *filler = &model->filler;
	int64_t left = (int64_t)hold_left((uint64_t)word_of(model, now), (uint64_t)now);

	allowance_observe(&filler->allowance, (uint64_t)now, filler->sleeps);
	return filler->obeys ? least(left, (int64_t)allowance_left(&filler->allowance, (uint64_t)now)) : 0;
}

/* Notes finished kernels: those before a marker that was reached. */
static void look(struct filler *filler)
{
	const int64_t marked = (int64_t)pace_mark_every(&filler->pace, filler->bound_us), every = marked ? marked : 1;
	const int64_t finished = filler->context.finished, known = finished / every * every;

	if (finished == filler->submitted)
		filler->heard = finished;
	else if (known > filler->heard)
		filler->heard = known;
}

static bool is_ahead(struct model *model, int64_t now, bool watched)
{
	struct filler *filler = &model->filler;
	const uint64_t now_us = (uint64_t)(now / US), held_until = (uint64_t)((word_of(model, now) + US - 1) / US);
	uint64_t pending;

	if (!filler->ahead_us)
		return filler->submitted - filler->context.finished >= AHEAD_MOST;
	pending = (uint64_t)(filler->submitted - filler->heard);
	if ((uint64_t)filler->heard > filler->pace.finished)
		pace_learn(&filler->pace, (uint64_t)filler->heard, pending, watched, held_until > filler->pace.since,
			   now_us);
	if (!pending)
		filler->pace.since = now_us;
	filler->bound_us = hold_ahead_us(filler->ahead_us, held_until, now_us);
	filler->more_us = (int64_t)pace_more_us(&filler->pace, pending, filler->bound_us, now_us);
	return pace_has_more(&filler->pace, pending, filler->bound_us, now_us);
}

/* Launches one kernel, or waits: turn_hold of turn.c. */
static void fill(struct model *model, int64_t now)
{
	struct filler *filler = &model->filler;
	int64_t left;

	if (filler->falls_back) {
		look(filler);
		if (is_ahead(model, now, true)) {
			filler->next = now + (filler->more_us ? least(LOOK, filler->more_us * US + LATE) : LOOK);
			return;
		}
		filler->falls_back = false;
		filler->fell_back = true;
	}
	left = held_for(model, now);
	if (left) {
		filler->since = filler->sleeps ? filler->since : now;
		filler->sleeps = true;
		filler->next = now + left + LATE;
		return;
	}
	filler->held += filler->sleeps ? now - filler->since : 0;
	filler->sleeps = false;
	filler->next = now + FILL;
	if (!filler->fell_back && is_ahead(model, now, false)) {
		filler->falls_back = true;
		return;
	}
	filler->fell_back = false;
	filler->submitted++;
	queue(&filler->context);
}

/* The leaders, which serve requests */

/* Does what is due: launches a request, or notes the end of one. Returns whether a request ended. */
static bool serve(struct leader *leader, int64_t now)
{
	if (!leader->busy) {
		leader->busy = true;
		leader->periods += leader->until <= now;	/* as burst_begin counts them */
		leader->next = NEVER;
		queue(&leader->context);
		return false;
	}
	leader->busy = false;
	leader->until = now + leader->hold;
	leader->latencies[leader->served] = now - leader->requests[leader->served];
	leader->served++;
	begin(leader, now);
	return true;
}

/* Simulates up to a time. */
void model_run(struct model *model, int64_t until)
{
	struct filler *filler = &model->filler;

	while (model->now < until) {
		int64_t due = model->fills ? least(filler->next, until) : until;
		int of = -1;

		for (int i = 0; i < model->count; i++)
			due = least(due, model->leaders[i].next);
		if (due > model->now)
			of = advance(model, due);
		if (of >= 0) {
			if (of < model->count)
				model->leaders[of].next = model->now + RETURN;
			continue;
		}
		for (int i = 0; i < model->count; i++)
			/* A filler that sleeps is woken when the lease in the word is shortened. */
			if (model->leaders[i].next <= model->now && serve(&model->leaders[i], model->now) &&
			    filler->sleeps)
				filler->next = least(filler->next, model->now + LATE);
		if (model->fills && filler->next <= model->now)
			fill(model, model->now);
	}
}

int64_t model_now(const struct model *model)
{
	return model->now;
}

/* Returns the time in which nothing ran. */
int64_t model_idle(const struct model *model)
{
	return model->idle;
}

/* Returns the number of finished requests of all leaders. */
int64_t model_served(const struct model *model)
{
	int64_t served = 0;

	for (int i = 0; i < model->count; i++)
		served += model->leaders[i].served;
	return served;
}

/* Returns the engine time of the filler, without switches. */
int64_t model_filled(const struct model *model)
{
	return model->filler.context.busy;
}

/* Returns the number of times that the filler came onto the engine. */
int64_t model_stays(const struct model *model)
{
	return model->filler.context.stays;
}

/* Returns the number of busy periods of all leaders. */
int64_t model_periods(const struct model *model)
{
	int64_t periods = 0;

	for (int i = 0; i < model->count; i++)
		periods += model->leaders[i].periods;
	return periods;
}

/* Returns the time from the call of a request to its return, without its work. */
int64_t model_call(void)
{
	return LAUNCH + RETURN;
}

int64_t model_switch(void)
{
	return SWITCH;
}
