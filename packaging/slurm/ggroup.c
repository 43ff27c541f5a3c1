// SPDX-License-Identifier: Apache-2.0
/* A plugin of Slurm (spank(8)): turns options of jobs into settings of their slices.
 *
 * sbatch, salloc and srun load it to check values, and slurmstepd loads it on the nodes. A failure there is reported
 * from task_init_privileged, which ends the task: a failure in init, init_post_opt or user_init would drain the node
 * (src/slurmd/slurmstepd/mgr.c, job_manager()). */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Symbols that Slurm looks up by name. */
#pragma GCC visibility push(default)
#include <slurm/spank.h>
SPANK_PLUGIN(ggroup, 1)
#pragma GCC visibility pop

#include "job.h"
#include "step.h"
#include "words.h"

/* Takes the value of an option. A failing callback refuses the submission; on a node it would drain the node. */

static int take(int at, const char *text, int remote)
{
	char reason[REASON];
	struct value value = { 0 };
	const char *wrong = value_parse(&rows[at], text ? text : "", &value);

	if (wrong)
		snprintf(reason, sizeof(reason), "--%s=%.100s: %s", rows[at].name, text ? text : "", wrong);
	else if (!remote && *here.config.fault)
		snprintf(reason, sizeof(reason), "%s", here.config.fault);
	else if (remote || !config_refuses(&here.config, NULL, &rows[at], value, 0, reason)) {
		here.asked[at] = value;
		return 0;
	}
	if (remote) {
		step_fail("%s", reason);
		return 0;
	}
	slurm_error("%s", reason);
	return -1;
}

static void options_register(spank_t spank)
{
	static const char *const words[] = { [SIZE] = "BYTES", [NUMBER] = "N", [QUOTA] = "PERCENT" };

	for (int at = 0; at < ROWS; at++) {
		struct spank_option option = { (char *)rows[at].name, (char *)words[rows[at].kind],
					       (char *)rows[at].usage, 1, at, take };

		if (spank_option_register(spank, &option) != ESPANK_SUCCESS)
			slurm_error("ggroup: --%s: another plugin has that option", option.name);
	}
}

int slurm_spank_init(spank_t spank, int count, char **words)
{
	config_read(&here.config, count, words);
	if (*here.config.fault)
		slurm_error("ggroup: %s", here.config.fault);
	if (spank_context() != S_CTX_SLURMD && spank_context() != S_CTX_JOB_SCRIPT)
		options_register(spank);
	return 0;
}

int slurm_spank_init_post_opt(spank_t spank, int count, char **words)
{
	const char *missing;

	(void)count, (void)words;
	if (!spank_remote(spank) || *here.failure)
		return 0;
	if (spank_get_item(spank, S_JOB_ID, &here.job) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_JOB_STEPID, &here.step) != ESPANK_SUCCESS)
		return 0;
	missing = tree_open(&here.tree, here.config.tree);
	if (missing && (here.config.runs_without || (!step_asks() && access(here.config.tree, F_OK))))
		return 0;
	if (*here.config.fault)
		step_fail("%s", here.config.fault);
	else if (step_find() && !missing)
		step_prepare();
	else if (missing && step_is_concerned())
		step_fail("no limit holds: %s: %s", here.config.tree, missing);
	return 0;
}

static void environment_set(spank_t spank)
{
	char old[PLACE], all[2 * PLACE];

	if (*here.tree.socket)
		spank_setenv(spank, "GGROUP_SOCKET", here.tree.socket, 1);
	if (!here.tree.nvidia || access(here.config.library, R_OK))
		return;
	if (!tree_moves_memory(&here.tree, here.place) && !tree_moves_memory(&here.tree, here.step_place))
		return;
	if (spank_getenv(spank, "LD_PRELOAD", old, sizeof(old)) != ESPANK_SUCCESS)
		*old = 0;
	if (preload_has(old, here.config.library))	/* inherited by this step from its script */
		return;
	snprintf(all, sizeof(all), "%s%s%s", here.config.library, *old ? ":" : "", old);
	spank_setenv(spank, "LD_PRELOAD", all, 1);
}

int slurm_spank_task_init_privileged(spank_t spank, int count, char **words)
{
	(void)count, (void)words;
	if (*here.failure) {
		slurm_error("ggroup: %s", here.failure);
		return -1;
	}
	if (here.is_followed)
		environment_set(spank);
	return 0;
}

/* Records the figures of the job when the last task of a step has ended, before its cgroup is removed. */
int slurm_spank_task_exit(spank_t spank, int count, char **words)
{
	char text[REASON];
	struct figures figures;
	uint32_t tasks = 0;
	const char *wrong;
	int fd;

	(void)count, (void)words;
	if (!here.is_followed || !here.config.records)
		return 0;
	if (spank_get_item(spank, S_JOB_LOCAL_TASK_COUNT, &tasks) != ESPANK_SUCCESS || ++here.ended < tasks)
		return 0;
	/* If there is a script on this node, its end is the end of the job. */
	fd = cgroup_open(here.cgroups.job);
	const bool is_last = step_speaks(fd);
	if (fd >= 0)
		close(fd);
	if (!is_last || !tree_figures(&here.tree, here.place, &figures) || !(figures.gpu_us || figures.peak))
		return 0;
	snprintf(text, sizeof(text), "gpu_seconds=%" PRIu64 ".%03" PRIu64 " gpu_mem_peak=%" PRIu64,
		 figures.gpu_us / 1000000, figures.gpu_us / 1000 % 1000, figures.peak);
	wrong = job_record(here.job, here.cgroups.node, text);
	if (wrong)
		slurm_info("ggroup: job %" PRIu32 ": %s is not in its record: %s", here.job, text, wrong);
	return 0;
}
