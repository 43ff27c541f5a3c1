/* SPDX-License-Identifier: Apache-2.0 */
/* What is said of the library's own doings. */
#ifndef GGROUP_CUDA_LOG_H
#define GGROUP_CUDA_LOG_H

/* One line on stderr, only with GGROUP_CUDA_LOG set in the environment. Never on stdout. */
void log_line(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
