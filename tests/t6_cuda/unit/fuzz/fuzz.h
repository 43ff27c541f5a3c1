/* SPDX-License-Identifier: Apache-2.0 */
/* A generator of calls about memory. */
#ifndef UNIT_FUZZ_H
#define UNIT_FUZZ_H

#include "device.h"

/* Called before the driver is initialized. */
void fuzz_prepare(void);
/* Run with a context of each GPU, the first of which is current. */
void fuzz(struct device *device, CUcontext context, CUcontext other);

#endif
