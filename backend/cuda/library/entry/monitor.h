/* SPDX-License-Identifier: Apache-2.0 */
/* Which entry points of NVML are caught, and the wrapper of each, as caught.h has it of the driver's. */
#ifndef GGROUP_CUDA_MONITOR_H
#define GGROUP_CUDA_MONITOR_H

/* The wrapper of what is at `pointer` in NVML; NULL: not one that is caught. */
void *monitor_at(const void *pointer);
/* The wrapper of a name; NULL where NVML is not loaded, or lacks it. */
void *monitor_wrapper(const char *name);
/* The wrapper of a name in any case: what our library exports under it. */
void *monitor_exported(const char *name);

#endif
