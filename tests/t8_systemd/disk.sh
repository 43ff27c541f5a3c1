#!/bin/sh
# disk.sh SUITE PACKAGES DIRECTORY IMAGE: a Debian with these packages on an ext4 image, that talks to tests/vm/guest.py.
set -eu

suite=$1 packages=$2 root=$3 image=$4
# The other end of tests/vm/guest.py.
here=$(dirname "$0")/../vm

rm -rf "$root" "$image"
mmdebstrap --quiet --variant=essential --include="$(echo "$packages" | tr ' ' ,)" "$suite" "$root"
install -m 644 "$here/agent.py" "$root/usr/local/lib/agent.py"
install -m 644 "$here/agent.service" "$root/etc/systemd/system/agent.service"
mkdir -p "$root/etc/systemd/system/multi-user.target.wants"
ln -s ../agent.service "$root/etc/systemd/system/multi-user.target.wants/agent.service"
echo "shared /mnt 9p ro,trans=virtio,version=9p2000.L,msize=512000 0 0" >"$root/etc/fstab"
echo guest >"$root/etc/hostname"
: >"$root/etc/machine-id"
# What takes time and is of no use to anybody here.
for unit in getty@tty1.service serial-getty@ttyS0.service dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service fstrim.timer systemd-timesyncd.service systemd-logind.service \
	systemd-update-utmp.service systemd-binfmt.service proc-sys-fs-binfmt_misc.automount console-getty.service; do
	ln -sf /dev/null "$root/etc/systemd/system/$unit"
done
# Nobody unplugs this machine.
echo force-unsafe-io >"$root/etc/dpkg/dpkg.cfg.d/guest"
mke2fs -q -t ext4 -d "$root" -L root "$image.new" 2G
rm -rf "$root"
mv "$image.new" "$image"
