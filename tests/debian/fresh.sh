#!/bin/sh
# fresh.sh SUITE PART...: does what a part of the README says, as root, in a Debian with only make, on this kernel.
#
#   run      make run, until its tour has ended
#   test     make test
#   deb      make deb; then the package is installed, mounts a tree, and is purged
#   PART     make PART, for any other name
#
# The system is made anew each time, from an archive that is kept for each suite below build/debian. The system is made
# there as well, and stays for inspection if KEEP is set. Its source tree has the files that git tracks, with the
# changes in the working tree. All processes started in it end with this script.
set -eu

here=$(dirname "$(realpath "$0")")
top=$(realpath "$here/../..")
suite=$1
shift
base=$top/build/debian
archive=$base/$suite.tar
mkdir -p "$base"

# The archive has only Debian's packages; whatever else is needed, the Makefile has to install.
if [ ! -e "$archive" ]; then
	mmdebstrap --quiet --variant=minbase --aptopt='APT::Install-Recommends "false"' --include=make,ca-certificates \
		"$suite" "$archive.new.tar"
	mv "$archive.new.tar" "$archive"
fi

# All users can reach the files, as in a home directory, because some tests run as a user without rights.
root=$(mktemp -d "$base/$suite.XXXXXX")
chmod 755 "$root"
# The system's mounts are in a mount namespace of their own, so nothing of this machine is mounted below it here.
[ -n "${KEEP-}" ] || trap 'rm -rf --one-file-system "$root"' EXIT
tar -xf "$archive" -C "$root" --exclude='./dev/*'
mkdir -p "$root/src/ggroupfs"
changed=$(git -C "$top" stash create)
git -C "$top" archive "${changed:-HEAD}" | tar -x -C "$root/src/ggroupfs"
install -m 755 "$here/inside.sh" "$root/src/inside.sh"
# The network of this machine, and the certificate authorities that it trusts.
cp -L /etc/resolv.conf "$root/etc/resolv.conf"
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
# No power failure can damage this system, so dpkg need not sync.
echo force-unsafe-io >"$root/etc/dpkg/dpkg.cfg.d/fresh"

# --kill-child: when unshare ends, so does the namespace's first process, and with it all the others.
# shellcheck disable=SC2046 # a word for each variable
unshare --mount --pid --uts --ipc --fork --kill-child "$here/enter.sh" "$root" \
	$(env | sed -n '/^\(https\{0,1\}_proxy\|no_proxy\|HTTPS\{0,1\}_PROXY\|NO_PROXY\|CI\)=[^ ]*$/p') \
	/src/inside.sh "$@" </dev/null
