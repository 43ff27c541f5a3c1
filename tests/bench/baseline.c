// SPDX-License-Identifier: Apache-2.0
/*
 * baseline - the yardstick of the file benchmark: the least a libfuse3 server can cost.
 *
 * One thread, the low-level API, files with direct_io, attributes and entries valid for 300 s, no flush and no xattr
 * handler, so a client sends it exactly the requests that it sends to ggroupfs. Every path of the shape
 * /<pid>/<n>/<file> exists, for any two numbers and the files named in files[]. Reads give "max\n"; writes are
 * accepted and forgotten. The root lists NR_LISTED of the numbers. Nothing is allocated per request.
 *
 * usage: baseline MOUNTPOINT        prints "ready" once mounted; SIGTERM unmounts
 */
#define FUSE_USE_VERSION 314
#include <errno.h>
#include <fuse_lowlevel.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TIMEOUT 300.0

static const char value[] = "max\n";
static const char *const files[] = { "gmem.limit.high", "gmem.limit.low", "gmem.current", "compute.freeze" };
enum { NR_FILES = sizeof(files) / sizeof(files[0]), FIRST_LISTED = 100000, NR_LISTED = 1000 };

/* An inode number encodes a path: bits 16.. the pid, bits 8..15 the GPU + 1, bits 0..7 the file + 1; the root is 1. */
#define INO(pid, gpu, file) ((fuse_ino_t)(pid) << 16 | (gpu) << 8 | (file))
#define IS_FILE(ino) ((ino) != FUSE_ROOT_ID && ((ino) & 0xff))

static struct stat attributes(fuse_ino_t ino)
{
	return (struct stat){
		.st_ino = ino,
		.st_mode = IS_FILE(ino) ? S_IFREG | 0644 : S_IFDIR | 0755,
		.st_nlink = IS_FILE(ino) ? 1 : 2,
		.st_size = IS_FILE(ino) ? 4096 : 0,
		.st_blksize = 4096,
	};
}

/* Return the number of the child called @name, or 0 if there is none. */
static fuse_ino_t child(fuse_ino_t parent, const char *name)
{
	char *end;
	unsigned long number = strtoul(name, &end, 10);

	if (IS_FILE(parent))
		return 0;
	if (parent == FUSE_ROOT_ID)
		return *end || !number || number > 1 << 22 ? 0 : INO(number, 0, 0);
	if (!(parent & 0xff00))
		return *end || number > 200 ? 0 : parent | (number + 1) << 8;
	for (int i = 0; i < NR_FILES; i++)
		if (!strcmp(name, files[i]))
			return parent | (i + 1);
	return 0;
}

static void do_lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
	fuse_ino_t ino = child(parent, name);
	struct fuse_entry_param entry = {
		.ino = ino, .attr = attributes(ino), .attr_timeout = TIMEOUT, .entry_timeout = TIMEOUT
	};

	if (ino)
		fuse_reply_entry(req, &entry);
	else
		fuse_reply_err(req, ENOENT);
}

static void do_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	struct stat st = attributes(ino);

	(void)fi;
	fuse_reply_attr(req, &st, TIMEOUT);
}

static void do_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	(void)ino;
	fi->direct_io = 1;
	fuse_reply_open(req, fi);
}

static void do_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *fi)
{
	size_t left = off < (off_t)strlen(value) ? strlen(value) - off : 0;

	(void)ino, (void)fi;
	fuse_reply_buf(req, value + strlen(value) - left, left < size ? left : size);
}

static void do_write(fuse_req_t req, fuse_ino_t ino, const char *buf, size_t size, off_t off, struct fuse_file_info *fi)
{
	(void)ino, (void)buf, (void)off, (void)fi;
	fuse_reply_write(req, size);
}

static void do_readdirplus(fuse_req_t req, fuse_ino_t ino, size_t size, off_t off, struct fuse_file_info *fi)
{
	static char buf[1 << 20];
	size_t used = 0;

	(void)fi;
	if (size > sizeof(buf))
		size = sizeof(buf);
	for (; ino == FUSE_ROOT_ID && off < NR_LISTED; off++) {
		fuse_ino_t pid = INO(FIRST_LISTED + off, 0, 0);
		struct fuse_entry_param entry = {
			.ino = pid, .attr = attributes(pid), .attr_timeout = TIMEOUT, .entry_timeout = TIMEOUT
		};
		char name[16];
		size_t length;

		snprintf(name, sizeof(name), "%d", (int)(FIRST_LISTED + off));
		length = fuse_add_direntry_plus(req, buf + used, size - used, name, &entry, off + 1);
		if (length > size - used)
			break;
		used += length;
	}
	fuse_reply_buf(req, buf, used);
}

static void do_release(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	(void)ino, (void)fi;
	fuse_reply_err(req, 0);
}

static const struct fuse_lowlevel_ops ops = {
	.lookup = do_lookup,
	.getattr = do_getattr,
	.open = do_open,
	.read = do_read,
	.write = do_write,
	.release = do_release,
	.readdirplus = do_readdirplus,
	.releasedir = do_release,
};

int main(int argc, char **argv)
{
	char *fuse_argv[] = { argv[0], "-o", "fsname=baseline,subtype=baseline", NULL };
	struct fuse_args args = FUSE_ARGS_INIT(3, fuse_argv);
	struct fuse_session *session;
	int status = 1;

	if (argc != 2) {
		fprintf(stderr, "usage: baseline MOUNTPOINT\n");
		return 2;
	}
	session = fuse_session_new(&args, &ops, sizeof(ops), NULL);
	if (!session)
		goto out_args;
	if (fuse_set_signal_handlers(session))
		goto out_session;
	if (fuse_session_mount(session, argv[1]))
		goto out_signals;
	puts("ready");
	fflush(stdout);
	status = fuse_session_loop(session) < 0;
	fuse_session_unmount(session);
out_signals:
	fuse_remove_signal_handlers(session);
out_session:
	fuse_session_destroy(session);
out_args:
	fuse_opt_free_args(&args);
	return status;
}
