#!/bin/sh
# inside.sh PART...: runs the parts in the fresh system; see fresh.sh.
set -eu
cd /src/ggroupfs

# Tests the package by itself, without a compiler, the source tree or systemd.
installed() {
	mount=$(mktemp -d)
	apt-get install -y -q --no-install-recommends ./build/deb/ggroupfs_*.deb
	cd /
	ggroupfs mount "$mount"
	ggroupfs tenant --mount "$mount" --gmem 64M --seconds 1 --report 1 | tail -n 1
	grep -x 'gmem.limit.high enforced' "$mount/ggroup.capabilities"
	umount "$mount"
	cd - >/dev/null
	apt-get purge -y -q ggroupfs
	left=$(find / -xdev -path /src -prune -o -path /proc -prune -o -name '*ggroupfs*' -print)
	[ -z "$left" ] || { echo "left behind: $left" >&2; return 1; }
}

for part; do
	echo "# Debian $(cat /etc/debian_version): $part"
	case $part in
	run) make run MOUNT="$(mktemp -d)" ;;
	deb) make deb && installed ;;
	*) make "$part" ;;
	esac
	echo "# $part: done"
done
