#!/bin/bash
# enter.sh CGROUP ARCHIVE DIRECTORY SHARED: becomes the systemd of the system in this archive, as process 1 of
# namespaces of its own (mount, pid, net, uts, ipc). The archive is unpacked into memory. tests/container/keeper.py
# starts this script. The mounts made here end with the last process in the container.
set -eu

cgroup=$1 archive=$2 directory=$3 shared=$4

# Join the cgroup, alone, so that systemd can delegate the controllers in it. It becomes the root of the cgroup tree.
if [ "$cgroup" != / ]; then
	echo 0 >"$cgroup/cgroup.procs"
	exec unshare --cgroup -- "$0" / "$archive" "$directory" "$shared"
fi

root=$directory/root
mount -t tmpfs -o mode=755,size=2G root "$root"
tar -xf "$archive" -C "$root"
mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
# These belong to the host.
for path in sys sysrq-trigger; do
	[ ! -e "$root/proc/$path" ] || mount --bind -o ro,nosuid,nodev,noexec "$root/proc/$path" "$root/proc/$path"
done
mount -t sysfs -o ro,nosuid,nodev,noexec sysfs "$root/sys"
mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755,nosuid tmpfs "$root/dev"
for device in null:1:3 zero:1:5 full:1:7 random:1:8 urandom:1:9 tty:5:0 fuse:10:229; do
	IFS=: read -r name major minor <<-END
		$device
	END
	mknod -m 666 "$root/dev/$name" c "$major" "$minor"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,nosuid,noexec devpts "$root/dev/pts"
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
ln -s fd/0 "$root/dev/stdin"
ln -s fd/1 "$root/dev/stdout"
ln -s fd/2 "$root/dev/stderr"
: >"$root/dev/console"
mount --bind "$directory/console" "$root/dev/console"
mount -t tmpfs -o mode=755,nosuid,nodev tmpfs "$root/run"
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs "$root/tmp"
# The directory of the socket that connects the host's programs with the container's.
mkdir -p "$root/run/host/socket"
mount --bind "$directory/socket" "$root/run/host/socket"
mount --bind -o ro "$shared" "$root/mnt"

# The limits that systemd sets on a machine, where that is allowed: root in some containers has no CAP_SYS_RESOURCE.
ulimit -Hn 524288 2>/dev/null || :
ulimit -Sn 1024
cd "$root"
mkdir old
pivot_root . old
# Mounts propagate as on a machine: in a container (the variable tells it so) systemd leaves that to the one that made
# it. The rights to load modules, set the clock and access the host's hardware are dropped.
exec chroot . /bin/sh -c 'umount --lazy /old && rmdir /old && mount --make-rshared / && exec env -i container=other \
	PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
	setpriv --bounding-set -sys_module,-sys_time,-sys_rawio /sbin/init systemd.show_status=no'
