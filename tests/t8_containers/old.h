/* SPDX-License-Identifier: Apache-2.0 */
/* Included before each file of the driver's double, which has to load in old images like the library (glibc.h). */
#ifndef OLD_H
#define OLD_H

#include "../../backend/cuda/library/driver/glibc.h"

GLIBC_OLD(dlopen, GLIBC_FIRST);
GLIBC_OLD(dlsym, GLIBC_FIRST);
#define fstat glibc_fstat

#endif
