// SPDX-License-Identifier: Apache-2.0
#include "values.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const struct row rows[] = {
#define GGROUP_OPTION(field, kind, name, control, least, most, initial, usage) \
	{ name, control, kind, least, most, initial, usage },
#define GGROUP_OPTION_AHEAD(name, control)
#include "options.def"
#undef GGROUP_OPTION
#undef GGROUP_OPTION_AHEAD
};

const struct ahead ahead[] = {
#define GGROUP_OPTION(field, kind, name, control, least, most, initial, usage)
#define GGROUP_OPTION_AHEAD(name, control) { name, control },
#include "options.def"
#undef GGROUP_OPTION
#undef GGROUP_OPTION_AHEAD
	{ NULL, NULL },
};

/* Digits of a number before and behind its point: NUMBER of ggroupfs/text/properties.py. */
#define DIGITS 30
#define HUNDREDTHS 10000	/* of a percent, in a whole */

static size_t digits(const char *text)
{
	return strspn(text, "0123456789");
}

/* Sets `end` behind the number at the start of a text: digits, and more of them behind a point. */
static bool number_at(const char *text, size_t behind_most, const char **end)
{
	const size_t before = digits(text);

	if (!before || before > DIGITS)
		return false;
	*end = text + before;
	if (**end == '.') {
		const size_t behind = digits(*end + 1);

		if (!behind || behind > behind_most)
			return false;
		*end += 1 + behind;
	}
	return true;
}

static const char *percent_parse(const char *text, struct value *value)
{
	const char *end;
	char *point;
	unsigned long whole, part = 0;

	if (!number_at(text, 2, &end) || strcmp(end, "%"))
		return "not a percentage";
	whole = strtoul(text, &point, 10);
	if (*point == '.')
		part = strtoul(point + 1, NULL, 10) * (digits(point + 1) == 1 ? 10 : 1);
	if (whole > 100 || (whole == 100 && part))
		return "more than 100 %";
	*value = (struct value){ .given = true, .percent = true, .number = whole * 100 + part };
	return NULL;
}

static const char *size_parse(const char *text, struct value *value)
{
	static const char suffixes[] = "KMGTP";
	static const char no_size[] = "not a size: bytes, or with K, M, G, T or P, a percentage, or infinity";
	const char *end, *suffix;
	long double bytes;

	if (!strcmp(text, "infinity") || !strcmp(text, "max")) {
		*value = (struct value){ .given = true, .number = NO_LIMIT };
		return NULL;
	}
	if (*text && text[strlen(text) - 1] == '%')
		return percent_parse(text, value);
	if (!number_at(text, DIGITS, &end))
		return no_size;
	bytes = strtold(text, NULL);
	if (*end && (suffix = strchr(suffixes, *end))) {
		for (const char *at = suffixes; at <= suffix; at++)
			bytes *= 1024;
		end++;
	}
	end += *end == 'B';
	if (*end)
		return no_size;
	if (bytes >= 18446744073709551616.0L)	/* 2^64 */
		return "too large";
	*value = (struct value){ .given = true, .number = (uint64_t)bytes };
	if (value->number > NO_LIMIT)
		value->number = NO_LIMIT;
	return NULL;
}

static const char *number_parse(const struct row *row, const char *text, struct value *value)
{
	static _Thread_local char reason[VALUE_TEXT];
	const size_t length = digits(text);
	unsigned long long number = length && length < 19 && !text[length] ? strtoull(text, NULL, 10) : UINT64_MAX;

	if (number < row->least || number > row->most) {
		snprintf(reason, sizeof(reason), "not a number from %" PRIu64 " to %" PRIu64, row->least, row->most);
		return reason;
	}
	*value = (struct value){ .given = true, .number = number };
	return NULL;
}

const char *value_parse(const struct row *row, const char *text, struct value *value)
{
	return row->kind == SIZE ? size_parse(text, value) : number_parse(row, text, value);
}

uint64_t value_on(struct value value, uint64_t capacity)
{
	return value.percent ? (uint64_t)((unsigned __int128)capacity * value.number / HUNDREDTHS) : value.number;
}

void value_text(const struct row *row, uint64_t number, char text[static VALUE_TEXT])
{
	if (row->kind == SIZE && number >= NO_LIMIT)
		snprintf(text, VALUE_TEXT, "max");
	else
		snprintf(text, VALUE_TEXT, "%" PRIu64, number);
}
