// SPDX-License-Identifier: Apache-2.0
#include "chunk.h"

const uint64_t class_bytes[CLASSES] = { 64 * GG_MIB, 16 * GG_MIB, 2 * GG_MIB };

enum chunk_class chunk_class(const struct region *region, size_t index)
{
	enum chunk_class class = 0;

	while (index >= region->count[class])
		index -= region->count[class++];
	return class;
}

size_t chunk_bytes(const struct region *region, size_t index)
{
	return class_bytes[chunk_class(region, index)];
}

size_t chunk_offset(const struct region *region, size_t index)
{
	enum chunk_class class;
	size_t offset = 0;

	for (class = 0; class < CLASSES && index >= region->count[class]; class++) {
		offset += region->count[class] * class_bytes[class];
		index -= region->count[class];
	}
	return class < CLASSES ? offset + index * class_bytes[class] : offset;
}

size_t chunk_at(const struct region *region, size_t offset)
{
	size_t index = 0;

	for (enum chunk_class class = 0; class < CLASSES; class++) {
		if (offset < region->count[class] * class_bytes[class])
			return index + offset / class_bytes[class];
		offset -= region->count[class] * class_bytes[class];
		index += region->count[class];
	}
	return index;
}
