// SPDX-License-Identifier: Apache-2.0
/* Misuse, injected faults, the log. */

#include "fake.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "internal.h"

struct rule {
	char name[64];
	uint64_t nth;
	CUresult code;
	uint64_t calls;
};

static struct rule rules[32];
static int rule_count;
static int log_file = -1;
static CUresult (*on_call)(const char *name); /* accessed atomically */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pid_t initialised; /* the process that called cuInit; accessed atomically */

void fake_die(const char *format, ...)
{
	va_list arguments;

	fprintf(stderr, "fake libcuda: ");
	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fprintf(stderr, "\n");
	abort();
}

uint64_t fake_number(const char *name, uint64_t otherwise)
{
	const char *text = getenv(name);

	return text ? strtoull(text, NULL, 0) : otherwise;
}

static void add_rules(const char *text)
{
	char *copy = text ? strdup(text) : NULL, *save = NULL;

	for (char *item = copy ? strtok_r(copy, ",", &save) : NULL; item; item = strtok_r(NULL, ",", &save)) {
		struct rule *rule = &rules[rule_count];
		unsigned long long nth = 1;
		int code = CUDA_ERROR_OUT_OF_MEMORY;

		if (rule_count == 32 || sscanf(item, "%63[^:]:%llu:%d", rule->name, &nth, &code) < 1)
			fake_die("FAKE_FAIL: %s", item);
		rule->nth = nth;
		rule->code = (CUresult)code;
		/* Other threads are in calls: a strcmp() with a half-written name may find it equal. */
		__atomic_store_n(&rule_count, rule_count + 1, __ATOMIC_RELEASE);
	}
	free(copy);
}

static void read_environment(void)
{
	const char *path = getenv("FAKE_LOG");

	if (path)
		log_file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	add_rules(getenv("FAKE_FAIL"));
}

/* Put the faults of FAKE_FAIL_LATER in force. */
__attribute__((visibility("default"))) void fake_fail_now(void)
{
	pthread_mutex_lock(&lock);
	add_rules(getenv("FAKE_FAIL_LATER"));
	pthread_mutex_unlock(&lock);
}

/*
 * From now on call `hook` first in every call; if its answer is not CUDA_SUCCESS, that is the call's answer. NULL ends
 * this.
 */
__attribute__((visibility("default"))) void fake_on_call(CUresult (*hook)(const char *name))
{
	__atomic_store_n(&on_call, hook, __ATOMIC_RELEASE);
}

CUresult fake_fault(const char *name)
{
	CUresult (*hook)(const char *) = __atomic_load_n(&on_call, __ATOMIC_ACQUIRE);
	CUresult result = fake_while_checkpointed(name);

	if (result != CUDA_SUCCESS)
		return result;
	pthread_once(&once, read_environment);
	if (log_file >= 0)
		dprintf(log_file, "%s %d\n", name, (int)gettid());
	result = hook ? hook(name) : CUDA_SUCCESS;
	for (int i = 0; i < __atomic_load_n(&rule_count, __ATOMIC_ACQUIRE) && !result; i++) {
		struct rule *rule = &rules[i];

		if (strcmp(rule->name, name))
			continue;
		pthread_mutex_lock(&lock);
		rule->calls++;
		if (!rule->nth || rule->calls == rule->nth)
			result = rule->code;
		pthread_mutex_unlock(&lock);
	}
	if (result)
		return result;
	return fake_initialised() || !strcmp(name, "cuInit") ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

/* As in the driver, nothing works before cuInit, or in a child of fork() afterwards. */
bool fake_initialised(void)
{
	return __atomic_load_n(&initialised, __ATOMIC_ACQUIRE) == getpid();
}

FAKE_EXPORT cuInit(unsigned int flags)
{
	pid_t none = 0;

	FAKE(cuInit);
	if (flags)
		return CUDA_ERROR_INVALID_VALUE;
	if (__atomic_compare_exchange_n(&initialised, &none, getpid(), false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
		fake_inject();
	return none && none != getpid() ? CUDA_ERROR_NOT_INITIALIZED : CUDA_SUCCESS;
}

FAKE_EXPORT cuDriverGetVersion(int *version)
{
	if (!version)
		return CUDA_ERROR_INVALID_VALUE;
	*version = 13000;
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuGetErrorName(CUresult error, const char **name)
{
	static __thread char text[32];

	snprintf(text, sizeof(text), "CUDA_ERROR_%d", (int)error);
	*name = text;
	return CUDA_SUCCESS;
}

FAKE_EXPORT cuGetErrorString(CUresult error, const char **text)
{
	return cuGetErrorName(error, text);
}
