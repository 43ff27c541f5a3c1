/* SPDX-License-Identifier: Apache-2.0 */
/* Linked to libcuda: print the file to which each entry point of the table was bound. */
#include <dlfcn.h>

#include "common.h"

static const struct { const char *name; void *pointer; } bound[] = {
#define ENTRY(name, ...) { #name, (void *)name },
#include "entries.def"
};

int main(void)
{
	for (size_t i = 0; i < sizeof(bound) / sizeof(bound[0]); i++) {
		Dl_info info;

		CHECK(dladdr(bound[i].pointer, &info));
		printf("%s %s %s\n", bound[i].name, strrchr(info.dli_fname, '/') + 1, info.dli_sname);
	}
	return 0;
}
