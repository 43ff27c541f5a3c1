/* SPDX-License-Identifier: Apache-2.0 */
/* The options of a job and their values. This part does not depend on Slurm. */
#ifndef GGROUP_VALUES_H
#define GGROUP_VALUES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Syntax of a value: the members of Kind in backend/core/settings.py that options use. */
enum kind { SIZE, NUMBER, QUOTA };

struct row {
	const char *name, *control;	/* option without its dashes; control file */
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

/* Size of a buffer for the text of a value, bytes. */
#define VALUE_TEXT 64
/* Number for `max`, or no limit: MAX of backend/core/settings.py. */
#define NO_LIMIT ((uint64_t)INT64_MAX)

struct value {
	bool given, percent;
	uint64_t number;	/* bytes; hundredths of a percent of the GPU's memory; microseconds;
				 * or the number itself */
	uint64_t period;	/* of a quota, in microseconds */
};

/* Parses a text. Returns NULL, or the reason why it is not a value of the option. */
const char *value_parse(const struct row *row, const char *text, struct value *value);

/* Returns the value on a GPU with that much memory: percentages become bytes. */
struct value value_on(struct value value, uint64_t capacity);

/* Returns whether one value is larger than the other, both on one GPU. */
bool value_exceeds(const struct row *row, struct value one, struct value other);

/* Returns the value that a group has before it is set. */
struct value value_initial(const struct row *row);

/* Formats a value for the control file. */
void value_text(const struct row *row, struct value value, char text[static VALUE_TEXT]);

#endif
