// SPDX-License-Identifier: Apache-2.0
#include "words.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OWN 256		/* bytes of the prefix of a node's entry: host names have up to 64 */
#define SEPARATOR "; "

unsigned long gres_count(const char *list, const char *name)
{
	const size_t length = strlen(name);
	unsigned long count = 0;
	int depth = 0;

	for (const char *at = list; at && *at; ) {
		const char *end = at;

		for (depth = 0; *end && (depth || *end != ','); end++)
			depth += (*end == '(') - (*end == ')');
		if (!strncmp(at, "gres/", 5))
			at += 5;
		if (!strncmp(at, name, length) && at[length] == ':') {
			const char *number = at + length + 1, *colon;
			const size_t plain = strcspn(number, "(,");

			/* In name:type:count, the count is the last part. */
			while ((colon = memchr(number, ':', plain - (number - at - length - 1))))
				number = colon + 1;
			count += strtoul(number, NULL, 10);
		}
		at = *end ? end + 1 : end;
	}
	return count;
}

void comment_with(const char *old, const char *node, const char *figures, char *comment, unsigned long size)
{
	char own[OWN];
	const int length = snprintf(own, sizeof(own), "ggroup/%s:", node);
	unsigned long end = 0;

	*comment = 0;
	while (old && *old) {
		const char *behind = strstr(old, SEPARATOR);
		const int part = behind ? behind - old : (int)strlen(old);

		if (strncmp(old, own, length) && end < size)
			end += snprintf(comment + end, size - end, "%.*s" SEPARATOR, part, old);
		old = behind ? behind + strlen(SEPARATOR) : NULL;
	}
	if (end < size)
		snprintf(comment + end, size - end, "%s %s", own, figures);
}

bool comment_has(const char *comment, const char *node, const char *figures)
{
	char own[OWN + OWN];
	const int length = snprintf(own, sizeof(own), "ggroup/%s: %s", node, figures);

	for (const char *at = comment; at; at = strstr(at, SEPARATOR), at = at ? at + strlen(SEPARATOR) : NULL)
		if (!strncmp(at, own, length) && (!at[length] || !strncmp(at + length, SEPARATOR, strlen(SEPARATOR))))
			return true;
	return false;
}

bool preload_has(const char *list, const char *library)
{
	const size_t length = strlen(library);

	for (; *list; list += strcspn(list, ": "), list += strspn(list, ": "))
		if (strcspn(list, ": ") == length && !strncmp(list, library, length))
			return true;
	return false;
}
