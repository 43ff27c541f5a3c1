// SPDX-License-Identifier: Apache-2.0
/* What the library says of itself in its file: `ggroupfs doctor` reads that without having it loaded. */
#include "link.h"

/* As backend/cuda/about.py has it. Integers are little-endian, as in messages. */
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
