// SPDX-License-Identifier: Apache-2.0
#include "config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TREE "/run/ggroup"
#ifndef LIBRARY
#define LIBRARY "/usr/lib/ggroupfs/backend/cuda/libggroup-cuda.so"
#endif

/* Largest number of shards of a GPU in an option; the shares of jobs are computed with 64 bits. */
#define SHARDS_MOST 1000000

static const struct row *row_of(const char *name, size_t length)
{
	for (const struct row *row = rows; row < rows + ROWS; row++)
		if (strlen(row->name) == length && !strncmp(row->name, name, length))
			return row;
	return NULL;
}

/* Parses [PARTITION:]OPTION=VALUE, <=VALUE or >=VALUE. Returns the reason if it is invalid, or NULL. */
static const char *rule_read(struct config *config, const char *word)
{
	struct rule rule = { .relation = DEFAULT, .text = word };
	const size_t named = strcspn(word, "=<>");
	const char *name = word, *colon = memchr(word, ':', named), *value = word + named;

	if (colon) {
		if (colon == word || colon - word >= PARTITION)
			return "not the name of a partition";
		memcpy(rule.partition, word, colon - word);
		name = colon + 1;
	}
	rule.row = row_of(name, word + named - name);
	if (!rule.row)
		return "no such option";
	if (*value == '<' || *value == '>')
		rule.relation = *value++ == '<' ? AT_MOST : AT_LEAST;
	if (*value++ != '=')
		return "=, <= or >= is missing";
	if (config->rule_count == RULES)
		return "more of them than there is room for";
	const char *reason = value_parse(rule.row, value, &rule.value);
	if (!reason)
		config->rules[config->rule_count++] = rule;
	return reason;
}

static const char *shards_read(struct config *config, const char *text)
{
	char *end;
	const unsigned long number = strtoul(text, &end, 10);

	if (*text < '1' || *text > '9' || *end || number > SHARDS_MOST)
		return "not a number of shards";
	config->shards = number;
	return NULL;
}

static const char *choice_read(const char *text, const char *yes, const char *no, bool *chosen)
{
	*chosen = !strcmp(text, yes);
	return *chosen || !strcmp(text, no) ? NULL : "not one of its words";
}

static const char *path_read(const char *text, const char **path)
{
	*path = text;
	return *text == '/' && strlen(text) < PLACE / 4 ? NULL : "not a path from the root";
}

static const char *word_read(struct config *config, const char *word)
{
	const char *value = strchr(word, '=');

	value = value ? value + 1 : "";
	if (!strncmp(word, "tree=", 5))
		return path_read(value, &config->tree);
	if (!strncmp(word, "library=", 8))
		return path_read(value, &config->library);
	if (!strncmp(word, "without=", 8))
		return choice_read(value, "run", "fail", &config->runs_without);
	if (!strncmp(word, "record=", 7))
		return choice_read(value, "comment", "no", &config->records);
	if (!strncmp(word, "shards=", 7))
		return shards_read(config, value);
	return rule_read(config, word);
}

void config_read(struct config *config, int count, char **words)
{
	*config = (struct config){ .tree = TREE, .library = LIBRARY, .records = true };
	for (int at = 0; at < count; at++) {
		const char *reason = word_read(config, words[at]);

		if (reason && !*config->fault)
			snprintf(config->fault, sizeof(config->fault), "plugstack.conf: %.100s: %s", words[at], reason);
	}
}

bool config_default(const struct config *config, const char *partition, const struct row *row, struct value *value)
{
	const struct rule *found = NULL;

	for (const struct rule *rule = config->rules; rule < config->rules + config->rule_count; rule++)
		if (rule->row == row && rule->relation == DEFAULT &&
		    (*rule->partition ? !strcmp(rule->partition, partition) : !found || !*found->partition))
			found = rule;	/* the last one; those of the partition take precedence */
	if (found)
		*value = found->value;
	return found;
}

static bool breaks(const struct rule *rule, struct value value, uint64_t capacity)
{
	if (rule->value.percent != value.percent && !capacity)
		return false;	/* cannot be decided before the node is known */
	const struct value asked = capacity ? value_on(value, capacity) : value;
	const struct value bound = capacity ? value_on(rule->value, capacity) : rule->value;
	return rule->relation == AT_MOST ? value_exceeds(rule->row, asked, bound) :
					   value_exceeds(rule->row, bound, asked);
}

bool config_refuses(const struct config *config, const char *partition, const struct row *row, struct value value,
		    uint64_t capacity, char reason[static REASON])
{
	for (const struct rule *rule = config->rules; rule < config->rules + config->rule_count; rule++) {
		if (rule->row != row || rule->relation == DEFAULT)
			continue;
		if (*rule->partition && (!partition || strcmp(rule->partition, partition)))
			continue;
		if (breaks(rule, value, capacity)) {
			snprintf(reason, REASON, "--%s: this cluster allows %.100s", row->name, rule->text);
			return true;
		}
	}
	return false;
}
