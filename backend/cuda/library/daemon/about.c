// SPDX-License-Identifier: Apache-2.0
/* The mark in the library's file, which `ggroupfs doctor` reads without loading the library. */
#include "link.h"

/* Layout as in backend/cuda/about.py. Integers are little-endian, as in messages. */
struct about {
	char magic[16];
	uint64_t version;
	uint64_t features;
};

__attribute__((used)) static const struct about about_library = {
	.magic = "ggroup library:",
	.version = WIRE_VERSION,
	.features = FEATURES,
};
