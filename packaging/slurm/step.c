// SPDX-License-Identifier: Apache-2.0
#include "step.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <slurm/slurm.h>

#include "job.h"

#define CGROUPS_TEXT 16384	/* bytes of /proc/self/cgroup */

struct step here;

void step_fail(const char *format, ...)
{
	va_list arguments;

	if (*here.failure)
		return;
	va_start(arguments, format);
	vsnprintf(here.failure, sizeof(here.failure), format, arguments);
	va_end(arguments);
}

bool step_asks(void)
{
	for (unsigned int at = 0; at < ROWS; at++)
		if (here.asked[at].given)
			return true;
	return false;
}

bool step_find(void)
{
	char lines[CGROUPS_TEXT];
	const char *wrong = "/proc/self/cgroup cannot be read";

	if (file_read("/proc/self/cgroup", lines, sizeof(lines)) > 0)
		wrong = cgroups_find(lines, here.job, &here.cgroups);
	if (wrong)
		step_fail("%s", wrong);
	return !wrong;
}

int cgroup_open(const char *cgroup)
{
	static const char *const mounts[] = { "/sys/fs/cgroup", "/sys/fs/cgroup/unified" };
	char path[PLACE + 64];
	int fd = -1;

	for (unsigned int at = 0; fd < 0 && at < sizeof(mounts) / sizeof(*mounts); at++) {
		snprintf(path, sizeof(path), "%s%s", mounts[at], cgroup);
		fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	}
	return fd;
}

bool step_speaks(int fd)
{
	return here.step == SLURM_BATCH_SCRIPT || here.step == SLURM_INTERACTIVE_STEP || fd < 0 ||
	       (faccessat(fd, "step_batch", F_OK, 0) && faccessat(fd, "step_interactive", F_OK, 0));
}

/* The requested value of one setting of a slice. */
struct wanted {
	struct value value;
	uint64_t shards, shards_of_gpu;	/* 0: only the value counts */
};

static uint64_t least_of(uint64_t one, uint64_t other)
{
	return one < other ? one : other;
}

/* Computes the value of one option on a GPU. Returns false if there is none. */
static bool wanted_on(const struct row *row, const struct wanted *wanted, uint64_t capacity, struct value *value)
{
	uint64_t share = NO_LIMIT;

	if (wanted->shards && row->kind == SIZE)
		share = (unsigned __int128)capacity * least_of(wanted->shards, wanted->shards_of_gpu) /
			wanted->shards_of_gpu;
	if (wanted->value.given) {
		*value = value_on(wanted->value, capacity);
		value->number = least_of(value->number, row->kind == SIZE ? share : UINT64_MAX);
		return true;
	}
	if (!wanted->shards)
		return false;
	if (row == &rows[ROW_high])
		*value = (struct value){ .number = share };
	else if (row == &rows[ROW_weight])
		*value = (struct value){ .number = least_of(row->initial * wanted->shards, row->most) };
	else
		return false;
	return true;
}

static bool setting_write(const char *place, unsigned int at, const struct row *row, const struct wanted *wanted)
{
	char text[VALUE_TEXT];
	struct value value;

	if (!wanted_on(row, wanted, here.tree.capacities[at], &value))
		return true;
	value_text(row, value, text);
	if (!tree_write(place, here.tree.gpus[at], row->control, text))
		return true;
	if (errno == EOPNOTSUPP && !wanted->value.given)	/* the weight that follows from shards */
		return true;
	step_fail("--%s: %s/%u/%s: %s: %s", row->name, place, here.tree.gpus[at], row->control, text,
		  errno == EOPNOTSUPP ? "not on this GPU (ggroupfs doctor says why)" : strerror(errno));
	return false;
}

/* Options are ignored if the step does not speak for the slice. */
static bool settings_write(const char *place, const struct job *job, bool speaks, unsigned long shards_of_gpu)
{
	char reason[REASON];

	for (const struct row *row = rows; row < rows + ROWS; row++) {
		struct wanted wanted = { .shards = shards_of_gpu ? job->shards : 0, .shards_of_gpu = shards_of_gpu };

		if (speaks && here.asked[row - rows].given)
			wanted.value = here.asked[row - rows];
		else if (place == here.place && job->has_gpu && !(job->shards && row == &rows[ROW_high]))
			config_default(&here.config, job->partition, row, &wanted.value);
		for (unsigned int at = 0; at < here.tree.gpu_count; at++) {
			if (speaks && here.asked[row - rows].given &&
			    config_refuses(&here.config, job->partition, row, wanted.value, here.tree.capacities[at],
					   reason)) {
				step_fail("%s", reason);
				return false;
			}
			if (!setting_write(place, at, row, &wanted))
				return false;
		}
	}
	return true;
}

static bool job_known(struct job *job)
{
	const char *wrong = job_read(here.job, here.cgroups.node, job);

	if (wrong)
		step_fail("slurmctld does not say what the job has: %s", wrong);
	return !wrong;
}

/* Applies the settings of the job's slice, which this step has made. */
static bool job_apply(bool speaks)
{
	struct job job;
	unsigned long shards_of_gpu = 0;

	if (!job_known(&job))
		return false;
	if (job.shards)
		shards_of_gpu = here.config.shards ? here.config.shards : job_shards_of_gpu(here.cgroups.node);
	if (job.shards && !shards_of_gpu) {
		step_fail("slurmctld does not say how many shards a GPU of this node has: shards=N in plugstack.conf");
		return false;
	}
	return settings_write(here.place, &job, speaks, shards_of_gpu);
}

/* Applies the settings of a step, which hold in addition to those of its job. */
static bool step_apply(void)
{
	struct job job;

	if (!job_known(&job))
		return false;
	if (tree_make(&here.tree, here.step_place) < 0) {
		step_fail("%s: cannot be made: %s", here.step_place, strerror(errno));
		return false;
	}
	return settings_write(here.step_place, &job, true, 0);
}

void step_prepare(void)
{
	const int fd = cgroup_open(here.cgroups.job);
	const bool speaks = step_speaks(fd);
	int made;

	if (!tree_slice(&here.tree, here.cgroups.job, here.place) ||
	    !tree_slice(&here.tree, here.cgroups.step, here.step_place)) {
		step_fail("%s: too long a path", here.cgroups.step);
		return;
	}
	/* Another step of the job that begins now waits until the settings are there. */
	if (fd >= 0)
		flock(fd, LOCK_EX);
	made = tree_make(&here.tree, here.place);
	if (made < 0)
		step_fail("%s: cannot be made: %s", here.place, strerror(errno));
	here.is_followed = made >= 0;
	if (made > 0 && !job_apply(speaks)) {
		rmdir(here.place);
		here.is_followed = false;
	}
	if (here.is_followed && step_asks() && !(made > 0 && speaks))
		step_apply();
	if (fd >= 0)
		close(fd);
}

bool step_is_concerned(void)
{
	struct job job;
	struct value value;

	if (step_asks())
		return true;
	if (!job_known(&job) || job.shards)
		return true;
	for (const struct row *row = rows; job.has_gpu && row < rows + ROWS; row++)
		if (config_default(&here.config, job.partition, row, &value))
			return true;
	return false;
}
