/* SPDX-License-Identifier: Apache-2.0 */
/* How many kernels were submitted and finished on each GPU, and the page that
 * shows it (counters.h). */
#ifndef GGROUP_CUDA_TOTALS_H
#define GGROUP_CUDA_TOTALS_H

#include "state.h"

void totals_add(struct device *device, uint64_t submitted, uint64_t finished);
void totals_forget(void);	/* in the child of fork() */

#endif
