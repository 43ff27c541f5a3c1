#!/bin/bash
# one_gpu.sh N COMMAND...: run COMMAND so that it sees only the Nth NVIDIA GPU of this host (from 0), as in a container,
# in a mount namespace with a /dev of its own. /dev is read-only, since NVIDIA's libraries, run by root, create missing
# device files (nvidia-modprobe) and would then see all GPUs again.
set -euo pipefail

if [ -z "${ONE_GPU_DEV-}" ]; then
	number=$1
	shift
	ONE_GPU=$(find /dev -maxdepth 1 -name 'nvidia[0-9]*' -printf '%f\n' | sort -V | sed -n "$((number + 1))p")
	[ -n "$ONE_GPU" ] || { echo "one_gpu.sh: no GPU $number on this host" >&2; exit 1; }
	ONE_GPU_DEV=$(mktemp -d)
	export ONE_GPU ONE_GPU_DEV
	status=0
	unshare --mount --propagation private -- "$0" "$@" || status=$?
	rmdir "$ONE_GPU_DEV"
	exit $status
fi

dev=$ONE_GPU_DEV
unset ONE_GPU_DEV
mount -t tmpfs -o mode=755 tmpfs "$dev"
for file in /dev/*; do
	name=${file##*/}
	case $name in
	nvidia[0-9]*) [ "$name" = "$ONE_GPU" ] || continue ;;
	esac
	if [ -L "$file" ]; then
		cp -a "$file" "$dev"
	elif [ -d "$file" ]; then
		mkdir "$dev/$name"
		mount --rbind "$file" "$dev/$name"
	else
		: >"$dev/$name"
		mount --bind "$file" "$dev/$name"
	fi
done
mount -o remount,ro "$dev"
mount --rbind "$dev" /dev
exec "$@"
