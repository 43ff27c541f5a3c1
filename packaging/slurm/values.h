/* SPDX-License-Identifier: Apache-2.0 */
/* The options of a job and their values. No part of this knows of Slurm. */
#ifndef GGROUP_VALUES_H
#define GGROUP_VALUES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* How a value is written: Kind of backend/core/settings.py, those that options have. */
enum kind { SIZE, NUMBER, QUOTA };

struct row {
	const char *name, *control;	/* option without its dashes; control file. */
	enum kind kind;
	uint64_t least, most, initial;
	const char *usage;
};

extern const struct row rows[];

enum {
#define GGROUP_OPTION(field, kind, name, control, least, most, initial, usage) ROW_##field,
#define GGROUP_PERIOD(least, most, initial)
#include "options.def"
#undef GGROUP_OPTION
#undef GGROUP_PERIOD
	ROWS
};

/* The longest text of a value, with its end. */
#define VALUE_TEXT 64
/* What stands for `max`, or no limit: MAX of backend/core/settings.py. */
#define NO_LIMIT ((uint64_t)INT64_MAX)

struct value {
	bool given, percent;
	uint64_t number;	/* bytes; hundredths of a percent of the GPU's memory; microseconds; or the number itself */
	uint64_t period;	/* of a quota, in microseconds */
};

/* Returns NULL, or the reason why a text is no value of the option. */
const char *value_parse(const struct row *row, const char *text, struct value *value);

/* Returns what a value is on a GPU with so much memory: never a percentage of it. */
struct value value_on(struct value value, uint64_t capacity);

/* Returns whether one is more than the other, both on one GPU. */
bool value_exceeds(const struct row *row, struct value one, struct value other);

/* Returns what a group has before it is set. */
struct value value_initial(const struct row *row);

/* Writes what the control file takes. */
void value_text(const struct row *row, struct value value, char text[static VALUE_TEXT]);

#endif
