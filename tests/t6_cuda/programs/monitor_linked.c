/* NO_LINK, LINK_NVML: with NVML among its libraries. */
/* SPDX-License-Identifier: Apache-2.0 */
#define LINKED
#include "monitor.c"
