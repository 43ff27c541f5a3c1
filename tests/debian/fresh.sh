#!/bin/sh
# fresh.sh SUITE PART...: what a part of the README says, in a Debian that has nothing but make, as root, on this kernel.
#
#   run      make run, until its tour has ended
#   test     make test
#   deb      make deb; the package is installed, mounts a tree, and is purged
#   PART     make PART, whatever else it is
#
# The system is made anew each time, from an archive of it that is kept for each suite below build/debian, where it is
# left for a look if KEEP is set. Its tree has the files that git knows, as they are now. All processes that it starts end with it.
set -eu

here=$(dirname "$(realpath "$0")")
top=$(realpath "$here/../..")
suite=$1
shift
base=$top/build/debian
archive=$base/$suite.tar
mkdir -p "$base"

# Nothing is known of them but that they are Debian's; what is needed besides is for the Makefile to bring.
if [ ! -e "$archive" ]; then
	mmdebstrap --quiet --variant=minbase --aptopt='APT::Install-Recommends "false"' --include=make,ca-certificates \
		"$suite" "$archive.new.tar"
	mv "$archive.new.tar" "$archive"
fi

# Every user can reach what is in it, as in a home directory: some tests are of users without rights.
root=$(mktemp -d "$base/$suite.XXXXXX")
chmod 755 "$root"
# Its mounts are in a namespace of its own: nothing of this machine is below it here.
[ -n "${KEEP-}" ] || trap 'rm -rf --one-file-system "$root"' EXIT
tar -xf "$archive" -C "$root" --exclude='./dev/*'
mkdir -p "$root/src/ggroupfs"
changed=$(git -C "$top" stash create)
git -C "$top" archive "${changed:-HEAD}" | tar -x -C "$root/src/ggroupfs"
install -m 755 "$here/inside.sh" "$root/src/inside.sh"
# The network of this machine, and whom it trusts there.
cp -L /etc/resolv.conf "$root/etc/resolv.conf"
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
# Nobody unplugs it.
echo force-unsafe-io >"$root/etc/dpkg/dpkg.cfg.d/fresh"

# With what this script runs in ends the first process of the namespace, and with that one everybody in there.
# shellcheck disable=SC2046 # a word for each variable
unshare --mount --pid --uts --ipc --fork --kill-child "$here/enter.sh" "$root" \
	$(env | sed -n '/^\(https\{0,1\}_proxy\|no_proxy\|HTTPS\{0,1\}_PROXY\|NO_PROXY\|CI\)=[^ ]*$/p') \
	/src/inside.sh "$@" </dev/null
