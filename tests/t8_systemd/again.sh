#!/bin/sh
# again.sh PACKAGE OTHER VERSION: writes OTHER, the same package with another version.
set -eu

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
dpkg-deb -R "$1" "$work"
sed -i "s/^Version: .*/Version: $3/" "$work/DEBIAN/control"
dpkg-deb --root-owner-group -Zgzip -z1 --build "$work" "$2" >/dev/null
