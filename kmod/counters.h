/* SPDX-License-Identifier: GPL-2.0 */
/* The page on which a process counts its kernels. */
#ifndef GGROUP_COUNTERS_H
#define GGROUP_COUNTERS_H

#include <linux/types.h>

struct ggroup;
struct page;
struct vm_area_struct;

/**
 * struct ggroup_counter_page - the page of one group
 * @page: NULL until it is first mapped; set once
 */
struct ggroup_counter_page {
	struct page *page;
};

/**
 * ggroup_counters_mmap() - do mmap() of a file that joined
 * @group: the group of the calling process, as the caller has checked
 * @vma: the mapping
 *
 * Return: 0, -EINVAL, -EPERM or -ENOMEM.
 */
int ggroup_counters_mmap(struct ggroup *group, struct vm_area_struct *vma);

/**
 * ggroup_counters_read() - read the page's counts
 * @group: the group
 * @submitted: kernels launched; 0 where the page was never mapped
 * @finished: kernels completed; likewise
 */
void ggroup_counters_read(struct ggroup *group, u64 *submitted, u64 *finished);

/**
 * ggroup_counters_free() - let the page go
 * @group: a group whose last reference is dropped
 */
void ggroup_counters_free(struct ggroup *group);

#endif
