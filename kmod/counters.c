// SPDX-License-Identifier: GPL-2.0
/*
 * A page that only the process writes: a launch is counted by a store, without a call.
 */

#include <linux/mm.h>

#include "compat.h"
#include "counters.h"
#include "group.h"

static_assert(sizeof(struct ggroup_counters) <= PAGE_SIZE);

/* Return the group's page, made at its first use; two simultaneous callers get the same. */
static struct page *page_of(struct ggroup *group)
{
	struct page *page = READ_ONCE(group->counters.page);
	struct page *other;

	if (page)
		return page;
	page = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_ZERO);
	if (!page)
		return NULL;
	other = cmpxchg(&group->counters.page, NULL, page);
	if (!other)
		return page;
	__free_page(page);
	return other;
}

int ggroup_counters_mmap(struct ggroup *group, struct vm_area_struct *vma)
{
	struct page *page;

	if (vma->vm_pgoff || vma->vm_end - vma->vm_start != PAGE_SIZE ||
	    !(vma->vm_flags & VM_SHARED))
		return -EINVAL;
	if (vma->vm_flags & VM_EXEC)
		return -EPERM;
	page = page_of(group);
	if (!page)
		return -ENOMEM;
	/*
	 * A child that counted on its parent's page would be counted as the parent. VM_IO is set
	 * since madvise(MADV_DOFORK) would otherwise take VM_DONTCOPY away again.
	 */
	vm_flags_set(vma, VM_IO | VM_DONTCOPY | VM_DONTEXPAND | VM_DONTDUMP);
	vm_flags_clear(vma, VM_MAYEXEC);
	return vm_insert_page(vma, vma->vm_start, page);
}

void ggroup_counters_read(struct ggroup *group, u64 *submitted, u64 *finished)
{
	struct page *page = READ_ONCE(group->counters.page);
	const struct ggroup_counters *counters;

	*submitted = 0;
	*finished = 0;
	if (!page)
		return;
	counters = page_address(page);
	*submitted = READ_ONCE(counters->submitted);
	*finished = READ_ONCE(counters->finished);
}

void ggroup_counters_free(struct ggroup *group)
{
	/* A mapping that still exists holds it too. */
	if (group->counters.page)
		put_page(group->counters.page);
}
