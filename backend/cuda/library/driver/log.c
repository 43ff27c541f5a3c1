// SPDX-License-Identifier: Apache-2.0
#include "log.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

void log_line(const char *format, ...)
{
	char line[512];
	va_list arguments;
	int used;

	if (!getenv("GGROUP_CUDA_LOG"))
		return;
	used = snprintf(line, sizeof(line), "ggroup-cuda[%d]: ", (int)getpid());
	va_start(arguments, format);
	used += vsnprintf(line + used, sizeof(line) - (size_t)used - 1, format, arguments);
	va_end(arguments);
	if (used > (int)sizeof(line) - 2)
		used = sizeof(line) - 2;
	line[used++] = '\n';
	/* One write(2), so that lines of several threads and processes do not mix. */
	if (write(STDERR_FILENO, line, (size_t)used) < 0)
		return;
}
