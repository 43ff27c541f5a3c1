// SPDX-License-Identifier: Apache-2.0
#include "family.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "glibc.h"
#include "log.h"

#define VARIABLE "GGROUP_FAMILY"
#define LENIENT "GGROUP_LENIENT"

/* Most families in one another: FAMILIES_MOST of backend/core/families.py. */
#define LEVELS 8
/* Most digits of a number. */
#define DIGITS 19
/* Most bytes of GGROUP_FAMILY, and of a line. */
#define TEXT 2048
#define LINE 512

enum kind { SIZE, NUMBER, SMS };	/* SMS: a number of them */

static const struct setting {
	const char *variable, *field;
	unsigned int place;
	enum kind kind;
	uint64_t least, most;
} settings[] = {
#define FAMILY_SETTING(variable, place, field, kind, least, most) { #variable, #field, place, kind, least, most },
#include "family.def"
#undef FAMILY_SETTING
};

#define SETTINGS (sizeof(settings) / sizeof(*settings))

struct level {
	uint64_t id;
	bool wanted[SETTINGS], strange;		/* strange: it has a field of a later version */
	uint64_t values[SETTINGS];
};

static struct level levels[LEVELS];
static unsigned int level_count;
static char complaint[LINE];	/* about what the environment asks for; empty for none */
static bool lenient;
/* Atomically: the thread that asks (sight.c) and the listening one may be told at the same time. */
static bool judged, answered;

extern char **environ;

/* Not getenv(3) and setenv(3): programs such as bash have their own, which are not ready yet. */
static char **find(const char *name)
{
	const size_t length = strlen(name);

	for (char **at = environ; at && *at; at++)
		if (!strncmp(*at, name, length) && (*at)[length] == '=')
			return at;
	return NULL;
}

static const char *look_up(const char *name)
{
	char **found = find(name);

	return found ? *found + strlen(name) + 1 : "";
}

static void put(char *entry)
{
	char **found = find(VARIABLE), **all;
	size_t count = 0;

	if (found) {
		*found = entry;
		return;
	}
	while (environ && environ[count])
		count++;
	all = malloc((count + 2) * sizeof(*all));
	if (!all)
		return;
	if (count)
		memcpy(all, environ, count * sizeof(*all));
	all[count] = entry;
	all[count + 1] = NULL;
	environ = all;		/* the former one stays: a reader of it may go on */
}

/* Values */

/* Read the number at `*text`, and move that behind it; false for no number, or one that is too long. */
static bool number_at(const char **text, uint64_t *value)
{
	const char *at = *text;

	for (*value = 0; isdigit((unsigned char)*at); at++) {
		if (at - *text >= DIGITS)
			return false;
		*value = *value * 10 + (uint64_t)(*at - '0');
	}
	if (at == *text)
		return false;
	*text = at;
	return true;
}

static bool size_of(const char *text, uint64_t *value)
{
	static const char suffixes[] = "KMGT";
	const char *suffix;
	unsigned int shift = 0;

	if (!strcmp(text, "max") || !strcmp(text, "infinity")) {
		*value = INT64_MAX;
		return true;
	}
	if (!number_at(&text, value))
		return false;
	if (*text) {
		suffix = strchr(suffixes, *text);
		if (!suffix || text[1])
			return false;
		shift = 10 * (unsigned int)(suffix - suffixes + 1);
	}
	*value = *value > (uint64_t)INT64_MAX >> shift ? INT64_MAX : *value << shift;
	return true;
}

static bool value_of(const struct setting *setting, const char *text, uint64_t *value)
{
	if (setting->kind == SIZE)
		return size_of(text, value);
	return number_at(&text, value) && !*text && *value >= setting->least && *value <= setting->most;
}

static void complain(const struct setting *setting, const char *text)
{
	if (*complaint)		/* the first one is enough */
		return;
	if (setting->kind == SIZE)
		snprintf(complaint, sizeof(complaint), "%s=%.100s: not a size: bytes, or with K, M, G or T, or max",
			 setting->variable, text);
	else
		snprintf(complaint, sizeof(complaint), "%s=%.100s: not a number from %llu to %llu", setting->variable,
			 text, (unsigned long long)setting->least, (unsigned long long)setting->most);
}

/* GGROUP_FAMILY */

/* Read a pair behind a colon, `field=value`. */
static bool pair_at(const char **text, struct level *level)
{
	const char *field = *text, *at = field;
	uint64_t value;
	size_t length;
	bool known = false;

	while (islower((unsigned char)*at) || *at == '_')
		at++;
	length = (size_t)(at - field);
	if (!length || *at++ != '=' || !number_at(&at, &value))
		return false;
	for (size_t i = 0; i < SETTINGS; i++) {
		if (strlen(settings[i].field) == length && !strncmp(settings[i].field, field, length)) {
			level->wanted[i] = known = true;
			level->values[i] = value;
		}
	}
	level->strange |= !known;
	*text = at;
	return true;
}

static bool level_at(const char **text, struct level *level)
{
	const char *at = *text;

	*level = (struct level){ 0 };
	for (int i = 0; i < 16; i++, at++) {
		if (!isdigit((unsigned char)*at) && !(*at >= 'a' && *at <= 'f'))
			return false;
		level->id = level->id << 4 | (uint64_t)(isdigit((unsigned char)*at) ? *at - '0' : *at - 'a' + 10);
	}
	while (*at == ':') {
		at++;
		if (!pair_at(&at, level))
			return false;
	}
	*text = at;
	return level->id != 0;
}

static bool levels_of(const char *text)
{
	while (*text) {
		if (level_count == LEVELS || !level_at(&text, &levels[level_count]))
			return false;
		level_count++;
		if (*text && (*text++ != ',' || !*text))
			return false;
	}
	return true;
}

static bool is_same(const struct level *one, const struct level *other)
{
	for (size_t i = 0; i < SETTINGS; i++)
		if (one->wanted[i] != other->wanted[i] || (one->wanted[i] && one->values[i] != other->values[i]))
			return false;
	return !one->strange;
}

/* Begin a new family: it gets a number, and the children inherit it by the environment. */
static void begin_level(const struct level *asked, const char *before)
{
	struct level *level = &levels[level_count];
	char text[TEXT];
	char *entry;
	int used;

	*level = *asked;
	while (!level->id)
		if (glibc_random(&level->id, sizeof(level->id), GRND_NONBLOCK) != sizeof(level->id))
			level->id = (uint64_t)getpid() << 32 | (uint64_t)(uintptr_t)&level;
	used = snprintf(text, sizeof(text), "%s=%s%s%016llx", VARIABLE, before, *before ? "," : "",
			(unsigned long long)level->id);
	for (size_t i = 0; i < SETTINGS && used < (int)sizeof(text); i++)
		if (level->wanted[i])
			used += snprintf(text + used, sizeof(text) - (size_t)used, ":%s=%llu", settings[i].field,
					 (unsigned long long)level->values[i]);
	if (used >= (int)sizeof(text)) {
		snprintf(complaint, sizeof(complaint), "%s: too long", VARIABLE);
		return;
	}
	level_count++;
	entry = strdup(text);
	if (entry)
		put(entry);
}

/* Runs as the library is loaded, in the only thread that exists then. */
__attribute__((constructor)) static void look(void)
{
	const char *before = look_up(VARIABLE), *text;
	struct level asked = { 0 };
	bool any = false;

	lenient = !strcmp(look_up(LENIENT), "1");
	if (!levels_of(before)) {
		snprintf(complaint, sizeof(complaint), "%s=%.100s: not what ggroupfs puts there: unset it", VARIABLE,
			 before);
		before = "";
		level_count = 0;
	}
	for (size_t i = 0; i < SETTINGS; i++) {
		text = look_up(settings[i].variable);
		if (!*text)
			continue;
		asked.wanted[i] = value_of(&settings[i], text, &asked.values[i]);
		if (!asked.wanted[i])
			complain(&settings[i], text);
		any |= asked.wanted[i];
	}
	if ((*complaint && !lenient) || !any || (level_count && is_same(&levels[level_count - 1], &asked)))
		return;
	if (level_count == LEVELS)
		snprintf(complaint, sizeof(complaint), "%s: %d families in one another are the most", VARIABLE, LEVELS);
	else
		begin_level(&asked, before);
}

/* Reporting */

/* One write(2), so that lines of several threads and processes do not mix. */
static void say(const char *words, const char *end)
{
	char line[LINE + 64];
	const int used = snprintf(line, sizeof(line), "ggroupfs: %s%s\n", words, end);

	if (write(STDERR_FILENO, line, (size_t)used) < 0)
		return;
}

void family_begin(void)
{
	if (!*complaint || __atomic_exchange_n(&judged, true, __ATOMIC_ACQ_REL))
		return;
	say(complaint, lenient ? ": ignored" : "");
	if (!lenient)
		_exit(EXIT_FAILURE);
}

bool family_request(unsigned int number, struct message *message)
{
	for (unsigned int at = 0; at < level_count; at++) {
		for (size_t i = 0; i < SETTINGS; i++) {
			if (levels[at].wanted[i] && !number--) {
				*message = (struct message){ .op = OP_WANT,
							     .args = { settings[i].place, levels[at].values[i] } };
				return true;
			}
		}
		if (!number--) {
			*message = (struct message){ .op = OP_FAMILY, .args = { levels[at].id } };
			return true;
		}
	}
	return false;
}

void family_refused(int error)
{
	const struct level *level = &levels[level_count - 1];
	char words[LINE];
	int used = 0;

	for (size_t i = 0; i < SETTINGS; i++)
		if (level->wanted[i])
			used += snprintf(words + used, sizeof(words) - (size_t)used, "%s%s=%llu", used ? " " : "",
					 settings[i].variable, (unsigned long long)level->values[i]);
	snprintf(words + used, sizeof(words) - (size_t)used, "%s: %s", used ? "" : VARIABLE, strerror(error));
	if (__atomic_exchange_n(&answered, true, __ATOMIC_ACQ_REL)) {
		log_line("%s", words);
		return;
	}
	say(words, lenient ? ": ignored" : "");
	if (!lenient)
		_exit(EXIT_FAILURE);
}

void family_taken(void)
{
	__atomic_store_n(&answered, true, __ATOMIC_RELEASE);
}

void family_forget(void)
{
	__atomic_store_n(&answered, false, __ATOMIC_RELEASE);
}
