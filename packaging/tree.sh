#!/bin/sh
# tree.sh install STAGE DESTDIR RECORD: copies a tree, and writes down at DESTDIR/RECORD what it made.
# tree.sh uninstall DESTDIR RECORD: takes away exactly that. A directory goes if it was made here and is empty.
set -eu

install_tree() {
	stage=$1 destination=$2 record=$2$3
	made=$(mktemp)
	trap 'rm -f "$made"' EXIT
	# Parents come first. What was recorded before is still ours.
	[ ! -e "$record" ] || cat "$record" >"$made"
	(cd "$stage" && find . -mindepth 1 | LC_ALL=C sort) | while IFS= read -r path; do
		path=${path#.}
		if [ -d "$stage$path" ] && [ ! -L "$stage$path" ]; then
			[ -d "$destination$path" ] && continue
			mkdir -p "$destination$path"
		else
			cp -P --preserve=mode --remove-destination "$stage$path" "$destination$path"
		fi
		printf '%s\n' "$path" >>"$made"
	done
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
		if [ -d "$destination$path" ] && [ ! -L "$destination$path" ]; then
			rmdir --ignore-fail-on-non-empty "$destination$path"
		else
			rm -f "$destination$path"
		fi
	done
}

what=$1
shift
"${what}_tree" "$@"
