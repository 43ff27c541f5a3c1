// The first program of the virtual machine, alone in its initramfs: it loads the modules that the root filesystem
// needs, mounts the host's root read-only with a tmpfs on top, and executes the given program there.

#define _GNU_SOURCE
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

// One a line, each after those that it needs.
#define MODULES "/modules"

static void load(const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (fd < 0 || (syscall(SYS_finit_module, fd, "", 0) && errno != EEXIST))
		err(1, "%s", path);
	close(fd);
}

static void attach(const char *type, const char *path, unsigned long flags, const char *options)
{
	mkdir(path, 0755);
	if (mount(type, path, type, flags, options))
		err(1, "%s on %s", type, path);
}

static void host_as_root(void)
{
	// The host does not write there while this machine lives, so reads are cached.
	attach("9p", "/host", MS_RDONLY, "trans=virtio,version=9p2000.L,cache=loose,msize=512000");
	attach("tmpfs", "/above", 0, "size=75%");
	if (mkdir("/above/upper", 0755) || mkdir("/above/work", 0755))
		err(1, "/above");
	attach("overlay", "/root", 0, "lowerdir=/host,upperdir=/above/upper,workdir=/above/work");
}

int main(int argc, char **argv)
{
	char line[256];
	FILE *modules = fopen(MODULES, "re");

	while (modules && fgets(line, sizeof(line), modules)) {
		line[strcspn(line, "\n")] = 0;
		load(line);
	}
	attach("devtmpfs", "/dev", 0, "mode=755");
	host_as_root();
	attach("devtmpfs", "/root/dev", 0, "mode=755");
	if (chdir("/root") || mount(".", "/", NULL, MS_MOVE, NULL) || chroot(".") || chdir("/"))
		err(1, "/root");
	if (argc < 2)
		errx(1, "no program was given");
	execv(argv[1], argv + 1);
	err(1, "%s", argv[1]);
}
