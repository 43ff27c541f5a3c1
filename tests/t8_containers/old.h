/* SPDX-License-Identifier: Apache-2.0 */
/* Read before each file of the double of the driver, which goes into old images as the library does (glibc.h). */
#ifndef OLD_H
#define OLD_H

#include "../../backend/cuda/library/driver/glibc.h"

GLIBC_OLD(dlsym, GLIBC_FIRST);
#define fstat glibc_fstat

#endif
