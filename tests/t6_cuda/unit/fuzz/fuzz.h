/* SPDX-License-Identifier: Apache-2.0 */
/* A generator of calls about memory. */
#ifndef UNIT_FUZZ_H
#define UNIT_FUZZ_H

#include "device.h"

/* Before the driver is begun. */
void fuzz_prepare(void);
/* In a context of each GPU, the first of which is current. */
void fuzz(struct device *device, CUcontext context, CUcontext other);

#endif
