/* SPDX-License-Identifier: Apache-2.0 */
/* The driver's own header, with every version of every entry point under its own name. */
#ifndef GGROUP_CUDA_API_H
#define GGROUP_CUDA_API_H

#ifndef __CUDA_API_VERSION_INTERNAL
#define __CUDA_API_VERSION_INTERNAL
#endif
#include <cuda.h>

#endif
