/* SPDX-License-Identifier: Apache-2.0 */
/* The library's log. */
#ifndef GGROUP_CUDA_LOG_H
#define GGROUP_CUDA_LOG_H

/* Write one line to stderr, only with GGROUP_CUDA_LOG set in the environment. Never to stdout. */
void log_line(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
