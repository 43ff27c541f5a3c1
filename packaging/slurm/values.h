/* SPDX-License-Identifier: Apache-2.0 */
/* The options of a job and their values. No part of this knows of Slurm. */
#ifndef GGROUP_VALUES_H
#define GGROUP_VALUES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* How a value is written: Kind of backend/core/settings.py, those that options have. */
enum kind { SIZE, NUMBER };

struct row {
	const char *name, *control;	/* option without its dashes; control file. */
	enum kind kind;
	uint64_t least, most, initial;
	const char *usage;
};

/* An option of a setting that this version does not have yet. */
struct ahead {
	const char *name, *control;
};

extern const struct row rows[];
extern const struct ahead ahead[];	/* the last one has no name */

enum {
#define GGROUP_OPTION(field, kind, name, control, least, most, initial, usage) ROW_##field,
#define GGROUP_OPTION_AHEAD(name, control)
#include "options.def"
#undef GGROUP_OPTION
#undef GGROUP_OPTION_AHEAD
	ROWS
};

/* The longest text of a value, with its end. */
#define VALUE_TEXT 64
/* What stands for `max`, or no limit: MAX of backend/core/settings.py. */
#define NO_LIMIT ((uint64_t)INT64_MAX)

struct value {
	bool given, percent;
	uint64_t number;	/* bytes; hundredths of a percent of the GPU's memory; or the number itself */
};

/* Returns NULL, or the reason why a text is no value of the option. */
const char *value_parse(const struct row *row, const char *text, struct value *value);

/* Returns the number on a GPU with so much memory. */
uint64_t value_on(struct value value, uint64_t capacity);

/* Writes what the control file takes. */
void value_text(const struct row *row, uint64_t number, char text[static VALUE_TEXT]);

#endif
