// SPDX-License-Identifier: Apache-2.0
#include "tree.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#define TEXT 16384	/* bytes of the largest file read here */
#define NUMBER_TEXT 32

long file_read(const char *path, char *text, unsigned long size)
{
	const int fd = open(path, O_RDONLY | O_CLOEXEC);
	unsigned long length = 0;
	long count = -1;

	if (fd < 0)
		return -1;
	while (length < size - 1 && (count = read(fd, text + length, size - 1 - length)) > 0)
		length += count;
	const int reason = errno;
	close(fd);
	errno = reason;
	text[length] = 0;
	return count < 0 ? -1 : (long)length;
}

/* Returns the rest of the line that begins with a key, and cuts the text off at the end of that line. */
static char *line_of(char *text, const char *key)
{
	const size_t length = strlen(key);

	for (char *line = text; line && *line; line = strchr(line, '\n'), line = line ? line + 1 : NULL)
		if (!strncmp(line, key, length) && line[length] == ' ') {
			line += length + 1;
			line[strcspn(line, "\n")] = 0;
			return line;
		}
	return NULL;
}

static bool number_of(const char *place, unsigned int gpu, const char *file, const char *key, uint64_t *number)
{
	char path[PLACE + 64], text[TEXT];
	const char *at = text;

	snprintf(path, sizeof(path), "%s/%u/%s", place, gpu, file);
	if (file_read(path, text, sizeof(text)) <= 0 || (key && !(at = line_of(text, key))))
		return false;
	*number = strtoull(at, NULL, 10);
	return isdigit((unsigned char)*at);
}

static bool is_number(const char *name)
{
	return *name && strspn(name, "0123456789") == strlen(name);
}

static const char *gpus_find(struct tree *tree)
{
	char place[PLACE];
	struct dirent *entry;
	DIR *directory;

	snprintf(place, sizeof(place), "%s/gpus", tree->mount);
	directory = opendir(place);
	if (!directory)
		return "its GPUs cannot be listed";
	tree->gpu_count = 0;
	while ((entry = readdir(directory)) && tree->gpu_count < GPUS) {
		const unsigned int gpu = strtoul(entry->d_name, NULL, 10);

		if (is_number(entry->d_name) &&
		    number_of(place, gpu, "gmem.capacity", NULL, &tree->capacities[tree->gpu_count]))
			tree->gpus[tree->gpu_count++] = gpu;
	}
	closedir(directory);
	return tree->gpu_count ? NULL : "it has no GPU";
}

const char *tree_open(struct tree *tree, const char *mount)
{
	char path[PLACE], text[TEXT], copy[TEXT];
	struct statfs about;
	const char *found;

	*tree = (struct tree){ .mount = mount };
	if (statfs(mount, &about))
		return errno == ENOTCONN ? "its daemon has died" : "it is not there";
	if (about.f_type != FUSE_SUPER_MAGIC)
		return "nothing is mounted there";
	snprintf(path, sizeof(path), "%s/ggroup.backend", mount);
	if (file_read(path, text, sizeof(text)) <= 0)
		return "its daemon does not answer";
	memcpy(copy, text, sizeof(copy));
	found = line_of(copy, "socket");
	if (found)
		snprintf(tree->socket, sizeof(tree->socket), "%s", found);
	found = line_of(text, "gpu");
	tree->nvidia = found && !strcmp(found, "nvidia");
	return gpus_find(tree);
}

const char *cgroups_find(const char *lines, uint32_t job, struct cgroups *found)
{
	char name[NUMBER_TEXT], path[PLACE];
	const char *line = lines;
	char *end;

	while (line && strncmp(line, "0::", 3))
		line = strchr(line, '\n'), line = line ? line + 1 : NULL;
	if (!line)
		return "no cgroup2 on this node";
	snprintf(path, sizeof(path), "%.*s", (int)strcspn(line + 3, "\n"), line + 3);
	const int length = snprintf(name, sizeof(name), "/job_%" PRIu32, job);
	end = path;
	do
		end = strstr(end, name);
	while (end && end[length] && end[length] != '/' && end++);
	if (!end)
		return "jobs have no cgroups: it takes ProctrackType=proctrack/cgroup, and cgroup/v2";
	*found = (struct cgroups){ .node = "" };
	snprintf(found->job, sizeof(found->job), "%.*s", (int)(end + length - path), path);
	end = end[length] ? strchrnul(end + length + 1, '/') : end + length;
	snprintf(found->step, sizeof(found->step), "%.*s", (int)(end - path), path);
	/* .../NODE_slurmstepd.scope/job_N */
	char *scope = strstr(path, "_slurmstepd.scope/"), *begin;
	if (scope) {
		*scope = 0;
		begin = strrchr(path, '/');
		snprintf(found->node, sizeof(found->node), "%s", begin ? begin + 1 : "");
	}
	return NULL;
}

/* A component of digits has an underscore before it in the tree: ggroupfs/text/names.py. */
bool tree_slice(const struct tree *tree, const char *cgroup, char place[static PLACE])
{
	size_t length = snprintf(place, PLACE, "%s/slice", tree->mount);

	for (const char *at = cgroup; *at; ) {
		at += strspn(at, "/");
		const size_t size = strcspn(at, "/");
		const size_t lines = strspn(at, "_"), all = lines + strspn(at + lines, "0123456789");

		if (!size)
			break;
		if (length + size + 3 > PLACE)
			return false;
		length += sprintf(place + length, "/%s%.*s", all == size && all > lines ? "_" : "", (int)size, at);
		at += size;
	}
	return true;
}

int tree_make(const struct tree *tree, const char *place)
{
	char path[PLACE];
	size_t at = strlen(tree->mount) + strlen("/slice");
	int made = -1;

	for (snprintf(path, sizeof(path), "%s", place); place[at]; ) {
		at += 1 + strcspn(place + at + 1, "/");
		path[at] = 0;
		made = !mkdir(path, 0755);
		if (!made && errno != EEXIST)
			return -1;
		path[at] = place[at];
	}
	return made;
}

int tree_write(const char *place, unsigned int gpu, const char *control, const char *text)
{
	char path[PLACE + 64], line[VALUE_TEXT + 1];
	const int length = snprintf(line, sizeof(line), "%s\n", text);

	snprintf(path, sizeof(path), "%s/%u/%s", place, gpu, control);
	const int fd = open(path, O_WRONLY | O_TRUNC | O_CLOEXEC);
	if (fd < 0)
		return -1;
	const long count = write(fd, line, length);
	const int reason = count < 0 ? errno : EIO;
	close(fd);
	errno = reason;
	return count == length ? 0 : -1;
}

bool tree_moves_memory(const struct tree *tree, const char *place)
{
	char path[PLACE + 64], text[TEXT], initial[VALUE_TEXT];

	for (const struct row *row = rows; row < rows + ROWS; row++) {
		value_text(row, value_initial(row), initial);
		for (unsigned int at = 0; row->kind == SIZE && at < tree->gpu_count; at++) {
			snprintf(path, sizeof(path), "%s/%u/%s", place, tree->gpus[at], row->control);
			if (file_read(path, text, sizeof(text)) <= 0)
				continue;
			text[strcspn(text, "\n")] = 0;
			if (strcmp(text, initial))
				return true;
		}
	}
	return false;
}

bool tree_figures(const struct tree *tree, const char *place, struct figures *figures)
{
	uint64_t us, peak;
	bool any = false;

	*figures = (struct figures){ 0 };
	for (unsigned int at = 0; at < tree->gpu_count; at++) {
		if (number_of(place, tree->gpus[at], "gcgroup.stat", "gpu_usec", &us)) {
			figures->gpu_us += us;
			any = true;
		}
		if (number_of(place, tree->gpus[at], "gmem.peak", NULL, &peak)) {
			figures->peak = peak > figures->peak ? peak : figures->peak;
			any = true;
		}
	}
	return any;
}
