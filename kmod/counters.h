/* SPDX-License-Identifier: GPL-2.0 */
/* The page in which a process counts its kernels. */
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

/* mmap() of a file that joined. The caller has checked whose group it is. */
int ggroup_counters_mmap(struct ggroup *group, struct vm_area_struct *vma);
/* What it says now; 0 where it was never mapped. */
void ggroup_counters_read(struct ggroup *group, u64 *submitted, u64 *finished);
/* The last reference to the group is gone. */
void ggroup_counters_free(struct ggroup *group);

#endif
