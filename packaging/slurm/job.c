// SPDX-License-Identifier: Apache-2.0
#include "job.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>

#include "words.h"

#define COMMENT 16384		/* bytes of the largest AdminComment written */
#define RECORD_TRIES 8		/* for nodes of one job that write at the same time */
#define RECORD_WAIT_US 50000	/* unit of the random wait before the comment is read back */

/* Returns Slurm's name of this node: that in the name of the scope, or the host's, as slurmd derives it. */
static const char *node_name(const char *node, char host[static PARTITION])
{
	if (*node)
		return node;
	if (gethostname(host, PARTITION))
		*host = 0;
	host[PARTITION - 1] = 0;
	host[strcspn(host, ".")] = 0;
	return host;
}

static const job_info_t *record_of(const job_info_msg_t *message, uint32_t id)
{
	for (uint32_t at = 0; at < message->record_count; at++)
		if (message->job_array[at].job_id == id)
			return &message->job_array[at];
	return NULL;
}

/* Returns the resources of the job on one of its nodes. */
static const char *resources(const job_info_t *record, const char *node)
{
	int at = 0;

	if (record->gres_detail_cnt > 1 && record->nodes) {
		/* The type is a pointer since 23.11, and a pointer typedef before. */
		__typeof__(slurm_hostlist_create("")) nodes = slurm_hostlist_create(record->nodes);

		at = nodes ? slurm_hostlist_find(nodes, node) : -1;
		slurm_hostlist_destroy(nodes);
	}
	if (at < 0)
		return NULL;
	return (uint32_t)at < record->gres_detail_cnt && record->gres_detail_str[at] ? record->gres_detail_str[at] : "";
}

const char *job_read(uint32_t id, const char *node, struct job *job)
{
	char host[PARTITION];
	job_info_msg_t *message = NULL;
	const char *reason = NULL, *gres;
	const job_info_t *record;

	*job = (struct job){ .partition = "" };
	if (slurm_load_job(&message, id, SHOW_DETAIL))
		return slurm_strerror(errno);
	record = record_of(message, id);
	gres = record ? resources(record, node_name(node, host)) : NULL;
	if (gres) {
		snprintf(job->partition, sizeof(job->partition), "%s", record->partition ? record->partition : "");
		job->shards = gres_count(gres, "shard");
		job->has_gpu = job->shards || gres_count(gres, "gpu");
	} else {
		reason = record ? "it does not know this node of the job" : "it does not know the job";
	}
	slurm_free_job_info_msg(message);
	return reason;
}

unsigned long job_shards_of_gpu(const char *node)
{
	char host[PARTITION], name[PLACE];
	node_info_msg_t *message = NULL;
	unsigned long shards = 0, gpus = 0;

	snprintf(name, sizeof(name), "%s", node_name(node, host));
	if (slurm_load_node_single(&message, name, 0))
		return 0;
	if (message->record_count) {
		shards = gres_count(message->node_array[0].gres, "shard");
		gpus = gres_count(message->node_array[0].gres, "gpu");
	}
	slurm_free_node_info_msg(message);
	return gpus ? shards / gpus : 0;
}

const char *job_record(uint32_t id, const char *node, const char *figures)
{
	char host[PARTITION], comment[COMMENT];

	node = node_name(node, host);
	for (unsigned int at = 0; at < RECORD_TRIES; at++) {
		job_info_msg_t *message = NULL;
		const job_info_t *record;
		job_desc_msg_t change;
		bool stands, shared;

		if (slurm_load_job(&message, id, 0))
			return slurm_strerror(errno);
		record = record_of(message, id);
		if (record)
			comment_with(record->admin_comment, node, figures, comment, sizeof(comment));
		stands = record && comment_has(record->admin_comment, node, figures);
		shared = record && record->num_nodes > 1;
		slurm_free_job_info_msg(message);
		if (!record)
			return "it does not know the job";
		if (stands)
			return NULL;
		slurm_init_job_desc_msg(&change);
		change.job_id = id;
		change.admin_comment = comment;
		if (slurm_update_job(&change))
			return slurm_strerror(errno);
		if (!shared)
			return NULL;
		/* Another node may have read before this one wrote, and written after it. */
		usleep(RECORD_WAIT_US * (1 + rand() % (1 << at)));
	}
	return "nodes of the job wrote at the same time";
}
