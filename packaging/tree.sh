#!/bin/sh
# tree.sh install STAGE DESTDIR RECORD: copies a tree, and records at DESTDIR/RECORD what it created.
# tree.sh uninstall DESTDIR RECORD: removes exactly that. A directory is removed if it was created here and is empty.
set -eu

install_tree() {
	stage=$1 destination=$2 record=$2$3
	made=$(mktemp)
	trap 'rm -f "$made"' EXIT
	# Keep what an earlier installation recorded.
	[ ! -e "$record" ] || cat "$record" >"$made"
	# Parents come first.
	(cd "$stage" && find . -mindepth 1 -type d | LC_ALL=C sort) | while IFS= read -r path; do
		path=${path#.}
		[ ! -d "$destination$path" ] || continue
		mkdir -p "$destination$path"
		printf '%s\n' "$path" >>"$made"
	done
	# The archive contains no directories, so existing ones keep their attributes.
	(cd "$stage" && find . ! -type d -print0 | tar --null --no-recursion -cf - -T -) |
		tar -C "$destination/" --no-same-owner -p -m --unlink-first -xf -
	(cd "$stage" && find . ! -type d) | cut -c 2- >>"$made"
	LC_ALL=C sort -u "$made" >"$record"
	chmod 644 "$record"
}

uninstall_tree() {
	destination=$1 record=$1$2
	[ -e "$record" ] || { echo "nothing is installed: there is no $record" >&2; return 0; }
	# Children come first.
	paths=$(LC_ALL=C sort -r "$record")
	rm -f "$record"
	printf '%s\n' "$paths" | while IFS= read -r path; do
		[ -d "$destination$path" ] && [ ! -L "$destination$path" ] || printf '%s\n' "$destination$path"
	done | xargs -d '\n' rm -f
	printf '%s\n' "$paths" | while IFS= read -r path; do
		[ ! -d "$destination$path" ] || [ -L "$destination$path" ] || printf '%s\n' "$destination$path"
	done | xargs -r -d '\n' rmdir --ignore-fail-on-non-empty
}

what=$1
shift
"${what}_tree" "$@"
