/* SPDX-License-Identifier: Apache-2.0 */
/* A generator of calls about a program's own physical memory. */
#ifndef UNIT_FUZZ_H
#define UNIT_FUZZ_H

#include "device.h"

void fuzz(struct device *device);

#endif
