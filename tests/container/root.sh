#!/bin/sh
# root.sh SUITE PACKAGES ARCHIVE: makes an archive of a Debian with these packages and with the agent of guest.py.
set -eu

suite=$1 packages=$2 archive=$3
here=$(dirname "$0")

work=$(mktemp -d "$archive.XXXXXX")
trap 'rm -rf --one-file-system "$work"' EXIT
# The permissions of a root directory, not of a temporary one.
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
# Units that take time and are of no use in the tests.
for unit in getty@tty1.service console-getty.service dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service \
	fstrim.timer systemd-timesyncd.service systemd-logind.service systemd-update-utmp.service \
	systemd-binfmt.service proc-sys-fs-binfmt_misc.automount; do
	ln -sf /dev/null "$root/etc/systemd/system/$unit"
done
# No power failure can damage this system, so dpkg need not sync.
echo force-unsafe-io >"$root/etc/dpkg/dpkg.cfg.d/guest"
tar -C "$root" --exclude='./dev/*' -cf "$work/archive" .
mv "$work/archive" "$archive"
