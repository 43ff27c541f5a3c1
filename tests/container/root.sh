#!/bin/sh
# root.sh SUITE PACKAGES ARCHIVE: a Debian with these packages that talks to tests/container/guest.py, as an archive.
set -eu

suite=$1 packages=$2 archive=$3
here=$(dirname "$0")

work=$(mktemp -d "$archive.XXXXXX")
trap 'rm -rf --one-file-system "$work"' EXIT
# That of a system, not of a temporary directory.
chmod 755 "$work"
root=$work/root
mmdebstrap --quiet --variant=essential --include="$(echo "$packages" | tr ' ' ,)" "$suite" "$root"
install -m 644 "$here/agent.py" "$root/usr/local/lib/agent.py"
install -m 644 "$here/agent.service" "$root/etc/systemd/system/agent.service"
mkdir -p "$root/etc/systemd/system/multi-user.target.wants"
ln -s ../agent.service "$root/etc/systemd/system/multi-user.target.wants/agent.service"
: >"$root/etc/fstab"
echo guest >"$root/etc/hostname"
: >"$root/etc/machine-id"
# What takes time and is of no use to anybody here.
for unit in getty@tty1.service console-getty.service dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service \
	fstrim.timer systemd-timesyncd.service systemd-logind.service systemd-update-utmp.service systemd-binfmt.service \
	proc-sys-fs-binfmt_misc.automount; do
	ln -sf /dev/null "$root/etc/systemd/system/$unit"
done
# Nobody unplugs it.
echo force-unsafe-io >"$root/etc/dpkg/dpkg.cfg.d/guest"
tar -C "$root" --exclude='./dev/*' -cf "$work/archive" .
mv "$work/archive" "$archive"
