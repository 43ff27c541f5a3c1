// SPDX-License-Identifier: Apache-2.0
#include "values.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const struct row rows[] = {
#define GGROUP_OPTION(field, kind, name, control, least, most, initial, usage) \
	{ name, control, kind, least, most, initial, usage },
#define GGROUP_PERIOD(least, most, initial)
#include "options.def"
#undef GGROUP_OPTION
#undef GGROUP_PERIOD
};

/* Period of a quota, microseconds. */
enum {
#define GGROUP_OPTION(field, kind, name, control, least, most, initial, usage)
#define GGROUP_PERIOD(least, most, initial) PERIOD_LEAST = least, PERIOD_MOST = most, PERIOD_INITIAL = initial,
#include "options.def"
#undef GGROUP_OPTION
#undef GGROUP_PERIOD
};

/* Digits of a number before and after its point: NUMBER of ggroupfs/text/properties.py. */
#define DIGITS 30
#define HUNDREDTHS 10000	/* hundredths of a percent in a whole */
#define BLANKS " \t\n\v\f\r"

static const char *because(const char *format, uint64_t one, uint64_t other)
{
	static _Thread_local char reason[VALUE_TEXT];

	snprintf(reason, sizeof(reason), format, one, other);
	return reason;
}

static size_t digits(const char *text)
{
	return strspn(text, "0123456789");
}

/*
 * Checks for a number at the start of a text, with at most that many digits after its point, and sets `end` behind it.
 */
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

static bool is_no_limit(const char *text)
{
	return !strcmp(text, "infinity") || !strcmp(text, "max");
}

/* Reads a percentage, in hundredths, and sets `end` behind its sign. */
static bool percent_at(const char *text, const char **end, unsigned __int128 *hundredths)
{
	char *point;
	unsigned long part = 0;

	if (!number_at(text, 2, end) || **end != '%')
		return false;
	++*end;
	*hundredths = (unsigned __int128)strtoul(text, &point, 10) * 100;	/* ULONG_MAX for longer numbers */
	if (*point == '.')
		part = strtoul(point + 1, NULL, 10) * (digits(point + 1) == 1 ? 10 : 1);
	*hundredths += part;
	return true;
}

static const char *percent_parse(const char *text, struct value *value)
{
	const char *end;
	unsigned __int128 hundredths;

	if (!percent_at(text, &end, &hundredths) || *end)
		return "not a percentage";
	if (hundredths > HUNDREDTHS)
		return "more than 100 %";
	*value = (struct value){ .given = true, .percent = true, .number = hundredths };
	return NULL;
}

static const char *size_parse(const char *text, struct value *value)
{
	static const char suffixes[] = "KMGTP";
	static const char no_size[] = "not a size: bytes, or with K, M, G, T or P, a percentage, or infinity";
	const char *end, *suffix;
	long double bytes;

	if (is_no_limit(text)) {
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

/* Reads a time span: a sum of numbers with units; without a unit they are milliseconds. */
static bool span_parse(const char *text, long double *us)
{
	static const struct {
		const char *name;
		unsigned int us;
	} units[] = { { "usec", 1 }, { "us", 1 }, { "\u00b5s", 1 }, { "msec", 1000 }, { "ms", 1000 },
		      { "sec", 1000000 }, { "s", 1000000 } };

	for (*us = 0; *(text += strspn(text, BLANKS)); ) {
		const long double number = strtold(text, NULL);
		unsigned int unit = 1000;

		if (!number_at(text, DIGITS, &text))
			return false;
		text += strspn(text, BLANKS);
		for (size_t at = 0; at < sizeof(units) / sizeof(*units); at++) {
			const size_t length = strlen(units[at].name);

			if (strncmp(text, units[at].name, length))
				continue;
			unit = units[at].us;
			text += length;
			break;
		}
		*us += number * unit;
	}
	return true;
}

/* Reads a percentage, and a period after a blank: _quota() of ggroupfs/text/properties.py. */
static const char *quota_parse(const struct row *row, const char *text, struct value *value)
{
	const char *end;
	unsigned __int128 hundredths, us;
	long double period = PERIOD_INITIAL;

	if (is_no_limit(text)) {
		*value = value_initial(row);
		value->given = true;
		return NULL;
	}
	if (!percent_at(text, &end, &hundredths) || (*end && *end != ' '))
		return "not a percentage, or one and a time span, or infinity";
	if (end[strspn(end, BLANKS)] && !span_parse(end, &period))
		return "not a time span: milliseconds, or with us or ms";
	if (period < PERIOD_LEAST || period >= PERIOD_MOST + 1)
		return because("a period that is not from %" PRIu64 " to %" PRIu64 " ms", PERIOD_LEAST / 1000,
			       PERIOD_MOST / 1000);
	us = (uint64_t)period * hundredths / HUNDREDTHS;
	if (us > row->most)
		return "too much";
	if (us < row->least)
		return because("less than %" PRIu64 " us in a period of %" PRIu64 " us", row->least, (uint64_t)period);
	*value = (struct value){ .given = true, .number = us, .period = period };
	return NULL;
}

static const char *number_parse(const struct row *row, const char *text, struct value *value)
{
	const size_t length = digits(text);
	unsigned long long number = length && length < 19 && !text[length] ? strtoull(text, NULL, 10) : UINT64_MAX;

	if (number < row->least || number > row->most)
		return because("not a number from %" PRIu64 " to %" PRIu64, row->least, row->most);
	*value = (struct value){ .given = true, .number = number };
	return NULL;
}

const char *value_parse(const struct row *row, const char *text, struct value *value)
{
	switch (row->kind) {
	case SIZE:
		return size_parse(text, value);
	case QUOTA:
		return quota_parse(row, text, value);
	default:
		return number_parse(row, text, value);
	}
}

struct value value_on(struct value value, uint64_t capacity)
{
	if (value.percent)
		value.number = (unsigned __int128)capacity * value.number / HUNDREDTHS;
	value.percent = false;
	return value;
}

bool value_exceeds(const struct row *row, struct value one, struct value other)
{
	if (row->kind == QUOTA)		/* compared as fractions of their periods */
		return (unsigned __int128)one.number * other.period > (unsigned __int128)other.number * one.period;
	return one.number > other.number;
}

struct value value_initial(const struct row *row)
{
	return (struct value){ .number = row->initial, .period = PERIOD_INITIAL };
}

void value_text(const struct row *row, struct value value, char text[static VALUE_TEXT])
{
	int length;

	if (row->kind != NUMBER && value.number >= NO_LIMIT)
		length = snprintf(text, VALUE_TEXT, "max");
	else
		length = snprintf(text, VALUE_TEXT, "%" PRIu64, value.number);
	if (row->kind == QUOTA)
		snprintf(text + length, VALUE_TEXT - length, " %" PRIu64, value.period);
}
