#!/bin/bash
# guest.sh SESSION: process 1 of the virtual machine. It turns the bare kernel into a system that tests can run on, runs
# the session's command and reports how that ended. If this script itself fails, the kernel panics, which ends it all.
set -eu

# host.py wrote it: directory, module, seconds, command
# shellcheck source=/dev/null
. "$1"

mount -t proc -o nosuid,nodev,noexec proc /proc
mount -t sysfs -o nosuid,nodev,noexec sysfs /sys
mount --bind "${directory:?}" /mnt
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o mode=1777 tmpfs /tmp
mkdir -p /dev/pts /dev/shm
mount -t devpts -o mode=620,ptmxmode=666 devpts /dev/pts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
# It may be below one of those: a user may try things in /tmp.
mkdir -p "$directory"
mount --move /mnt "$directory"
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t debugfs debugfs /sys/kernel/debug
mount -t tracefs tracefs /sys/kernel/tracing
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
[ -e /dev/fuse ] || modprobe fuse
# udev, which does not run here, would do this.
chmod 0666 /dev/fuse
ln -s /proc/self/fd /dev/fd
for number in 0:stdin 1:stdout 2:stderr; do ln -s "fd/${number%:*}" "/dev/${number#*:}"; done
echo guest >/proc/sys/kernel/hostname
[ -e /sys/fs/fuse/connections ] && mount -t fusectl fusectl /sys/fs/fuse/connections
ip link set lo up
# systemd gives every process this limit. The kernel's own is too low for a daemon that holds thousands of processes.
ulimit -Hn 524288
ulimit -Sn 1024

for port in /sys/class/virtio-ports/*; do
	read -r name <"$port/name"
	case $name in
	output) output=/dev/${port##*/} ;;
	status) status=/dev/${port##*/} ;;
	esac
done
exec 3>"${status:?}"

leaks=/sys/kernel/debug/kmemleak
if [ -e $leaks ]; then
	# Clear what the kernel itself seems to have lost.
	echo scan >$leaks
	echo clear >$leaks
fi
if [ -n "${module:?}" ] && [ "$module" != none ]; then
	insmod "$module"
fi

# Before the host gives up: write every task's stack into the kernel's log.
(
	read -r up _ </proc/uptime
	sleep $((${seconds:?} > ${up%.*} ? seconds - ${up%.*} : 0))
	echo "guest.sh: not done after $seconds s" >/dev/kmsg
	echo 8 >/proc/sys/kernel/printk
	for key in l t; do echo $key >/proc/sysrq-trigger; done
) &
watchdog=$!

cd "$directory"
code=0
setsid sh -c "${command:?}" </dev/null >"${output:?}" 2>&1 3>&- || code=$?
echo "command $code" >&3

kill $watchdog
cd /
if [ "$module" != none ]; then
	code=0
	rmmod ggroup || code=$?
	echo "rmmod $code" >&3
fi
if [ -e $leaks ]; then
	# kmemleak ignores objects younger than 5 s, and reports only what it saw twice.
	sleep 6
	echo scan >$leaks
	echo scan >$leaks
	# A line at a time, since a record of the log is bounded.
	while read -r line; do echo "kmemleak: $line" >/dev/kmsg; done <$leaks
fi
echo "done 0" >&3
# The host does not let a machine restart, so this is its end, and the quickest there is.
echo b >/proc/sysrq-trigger
