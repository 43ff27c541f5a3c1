// SPDX-License-Identifier: Apache-2.0
#include "ours.h"

__thread unsigned int ours_depth;
