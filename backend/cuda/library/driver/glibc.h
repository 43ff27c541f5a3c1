/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The oldest glibc of a program: 2.17, of 2012 (MOST of tests/t1_formats/t1_symbols.py). The library is built with a
 * later one, and goes into images of containers, which bring their own. A function that the old glibc lacks by its new
 * name is asked for by its older name, or of the kernel. The compiler reads this before each file (-include).
 */
#ifndef GGROUP_CUDA_GLIBC_H
#define GGROUP_CUDA_GLIBC_H

#include <features.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Since 2.38, strtoul(3) and sscanf(3) of _GNU_SOURCE are functions that also read 0b11 (features.h). */
#undef __GLIBC_USE_C2X_STRTOL
#define __GLIBC_USE_C2X_STRTOL 0
#undef __GLIBC_USE_C23_STRTOL
#define __GLIBC_USE_C23_STRTOL 0

/* glibc 2.34 has the threads and dlopen(3) in libc. Under their older versions they are in libpthread and libdl before
 * that, and in libc since. A sanitizer has its own, without a version. */
#ifdef OLD_GLIBC
#if defined(__x86_64__)
#define GLIBC_FIRST "GLIBC_2.2.5"
#define GLIBC_CLOCKS "GLIBC_2.3.3"
#define GLIBC_NAMES "GLIBC_2.12"
#elif defined(__aarch64__)
#define GLIBC_FIRST "GLIBC_2.17"
#define GLIBC_CLOCKS "GLIBC_2.17"
#define GLIBC_NAMES "GLIBC_2.17"
#else
#error "the first version of glibc for this machine is not known here"
#endif
#define GLIBC_OLD(name, version) __asm__(".symver " #name "," #name "@" version)

GLIBC_OLD(__pthread_register_cancel, GLIBC_CLOCKS);	/* pthread_cleanup_push(3), _pop(3) */
GLIBC_OLD(__pthread_unregister_cancel, GLIBC_CLOCKS);
GLIBC_OLD(__pthread_unwind_next, GLIBC_CLOCKS);
GLIBC_OLD(dladdr1, GLIBC_CLOCKS);
GLIBC_OLD(pthread_condattr_setclock, GLIBC_CLOCKS);
GLIBC_OLD(pthread_create, GLIBC_FIRST);
GLIBC_OLD(pthread_detach, GLIBC_FIRST);
GLIBC_OLD(pthread_getspecific, GLIBC_FIRST);
GLIBC_OLD(pthread_join, GLIBC_FIRST);
GLIBC_OLD(pthread_key_create, GLIBC_FIRST);
GLIBC_OLD(pthread_mutex_trylock, GLIBC_FIRST);
GLIBC_OLD(pthread_once, GLIBC_FIRST);
GLIBC_OLD(pthread_rwlock_init, GLIBC_FIRST);
GLIBC_OLD(pthread_rwlock_rdlock, GLIBC_FIRST);
GLIBC_OLD(pthread_rwlock_tryrdlock, GLIBC_FIRST);
GLIBC_OLD(pthread_rwlock_unlock, GLIBC_FIRST);
GLIBC_OLD(pthread_rwlock_wrlock, GLIBC_FIRST);
GLIBC_OLD(pthread_setname_np, GLIBC_NAMES);
GLIBC_OLD(pthread_setspecific, GLIBC_FIRST);
GLIBC_OLD(pthread_sigmask, GLIBC_FIRST);
#endif

/* fstat(2) and stat(2), which became functions of libc in 2.33: the kernel's structure is glibc's on 64 bits. */
static inline int glibc_fstat(int fd, struct stat *status)
{
	return (int)syscall(SYS_fstat, fd, status);
}

static inline int glibc_stat(const char *path, struct stat *status)
{
	return (int)syscall(SYS_newfstatat, AT_FDCWD, path, status, 0);
}

/* getrandom(2), which glibc has since 2.25. */
static inline ssize_t glibc_random(void *bytes, size_t count, unsigned int flags)
{
	return syscall(SYS_getrandom, bytes, count, flags);
}

#endif
