/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Differences between Linux 6.1 and 7.3. Kbuild tests for features instead of versions, as
 * distributions bring changes back to older kernels.
 */
#ifndef GGROUP_COMPAT_H
#define GGROUP_COMPAT_H

#include <linux/mm.h>

#ifndef GGROUP_HAVE_VM_FLAGS_SET	/* since 6.3 */
static inline void vm_flags_set(struct vm_area_struct *vma, vm_flags_t flags)
{
	vma->vm_flags |= flags;
}

static inline void vm_flags_clear(struct vm_area_struct *vma, vm_flags_t flags)
{
	vma->vm_flags &= ~flags;
}
#endif

#endif
