"""Limits of podman's containers with crun: by the environment, annotations and a device, and what is refused."""

from __future__ import annotations

import json

import pytest

from tests.container.guest import Completed, Guest
from tests.t8_containers.engine import GONE_S, NO_SLICE

MIB = 1 << 20
HIGH = 16 * MIB
"""The limit of the containers."""
RUN = "podman run --privileged --network none"
"""Runs a container of podman without any right that root in the test's container does not have."""
TREE = "-v /run/ggroup-shared:/run/ggroup-shared:ro,rslave"
HOLDS = "ggroupfs tenant --mount /run/ggroup-shared/tree --gmem 32M --report 1"
"""A program of the software GPU that wants twice the limit, in a container that has the command and the tree."""
RAN = "/run/ran"
MARKED = f"-v {RAN}:{RAN}"
MANY = 1000
"""How many containers come and go."""


def slice_of(guest: Guest, name: str) -> str:
    """The slice of a running container, in the tree."""
    pid = guest.ok(f"podman inspect -f '{{{{.State.Pid}}}}' {name}").strip()
    return "/run/ggroup/slice" + guest.ok(f"sed -n s/^0:://p /proc/{pid}/cgroup").strip()


def refused(guest: Guest, words: str) -> Completed:
    """What podman says about a container that does not start. Its program has not run."""
    guest.ok(f"rm -rf {RAN} && mkdir {RAN}")
    done = guest.run(f"{RUN} --rm {MARKED} {words}")
    assert done.code != 0, done
    assert guest.ok(f"ls {RAN}") == ""
    guest.until('test -z "$(podman ps -aq)"', "the container is gone")
    return done


def said(guest: Guest) -> str:
    """The hook's last line in the journal."""
    return guest.ok("journalctl -q -t ggroupfs-hook -n 1 -o cat")


def test_what_is_installed(guest: Guest) -> None:
    """One command installs everything: the hook, and the devices, which come and go with the service."""
    assert guest.ok("systemctl is-active ggroupfs-cdi") == "active\n"
    devices = json.loads(guest.ok("cat /run/cdi/ggroupfs.json"))["devices"]
    assert [one["name"] for one in devices] == ["0", "all"]
    assert guest.ok("systemctl --failed --plain --no-legend") == ""
    guest.ok("systemctl stop ggroupfs")
    assert guest.run("test -e /run/cdi/ggroupfs.json").code == 1
    guest.ok("systemctl start ggroupfs")
    guest.until("test -e /run/cdi/ggroupfs.json", "the devices are back")


def test_by_the_environment(guest: Guest) -> None:
    """The program and its children form a family below the container's cgroup."""
    guest.ok(f"{RUN} -d --name one --device ggroup.io/gpu=0 -e GGROUP_GMEM_HIGH=16M {TREE} --rootfs /srv/own {HOLDS}")
    place = f"{slice_of(guest, 'one')}/family-0-*/0"
    guest.until(f"test $(cat {place}/gmem.current) = {HIGH}", "the family is at its limit")
    assert guest.ok(f"cat {place}/gmem.limit.high") == f"{HIGH}\n"


@pytest.mark.parametrize("annotation", ["ggroup.gmem.limit.high=16M", "ggroup.GMemHigh=16M"])
def test_by_an_annotation(guest: Guest, annotation: str) -> None:
    """The container's slice has the limit before the program starts, and vanishes with the cgroup."""
    options = f"--name one --device ggroup.io/gpu=all --annotation {annotation} --annotation ggroup.compute.weight=30"
    guest.ok(f"{RUN} -d {options} {TREE} --rootfs /srv/own {HOLDS}")
    place = slice_of(guest, "one")
    assert guest.ok(f"cat {place}/0/gmem.limit.high {place}/0/compute.weight") == f"{HIGH}\n30\n"
    guest.until(f"test $(cat {place}/0/gmem.current) = {HIGH}", "the container is at its limit")
    guest.ok("podman rm -f -t 0 one")
    guest.until(f"test ! -e {place}", "the slice goes with the cgroup")


def test_runc_calls_the_hook_as_well(guest: Guest) -> None:
    """runc is the runtime of containerd and of Docker."""
    other = RUN.replace("podman", "podman --runtime runc", 1)
    guest.ok(f"{other} -d --name one --annotation ggroup.gmem.limit.high=16M new sleep 1000")
    assert guest.ok(f"cat {slice_of(guest, 'one')}/0/gmem.limit.high") == f"{HIGH}\n"
    done = guest.run(f"{other} --rm --annotation ggroup.gmem.limit.high=12Q new true")
    assert (done.code != 0, "no value of this file" in done.err) == (True, True), done


def test_an_annotation_needs_no_device(guest: Guest) -> None:
    guest.ok(f"{RUN} -d --name one --annotation ggroup.compute.weight=30 new sleep 1000")
    assert guest.ok(f"cat {slice_of(guest, 'one')}/0/compute.weight") == "30\n"


@pytest.mark.parametrize("image", ["old", "new"])
def test_the_library_runs_in_an_image_of_debian(guest: Guest, image: str) -> None:
    """The library is loaded with all symbols resolved (-z now), and has read its environment: the children inherit the
    family that it made."""
    script = (
        'import os; is_in = "libggroup-cuda.so" in open("/proc/self/maps").read();'
        'print(is_in, os.confstr("CS_GNU_LIBC_VERSION"), flush=True); os.execlp("env", "env")'
    )
    options = "--rm --device ggroup.io/gpu=all -e GGROUP_GMEM_HIGH=1G"
    lines = guest.ok(f"{RUN} {options} {image} python3 -c '{script}'").splitlines()
    assert lines[0] == f"True glibc {'2.31' if image == 'old' else '2.36'}"
    assert any(line.startswith("GGROUP_FAMILY=") and line.endswith(":high=1073741824") for line in lines)
    assert "GGROUP_SOCKET=/run/ggroupfs/ggroup.sock" in lines
    # With the driver's double: all calls succeed, and those that the library is to catch reach its wrappers.
    calls = f"{RUN} --rm --device ggroup.io/gpu=0 -v /mnt:/mnt:ro {image} python3 /mnt/calls.py /mnt"
    assert guest.ok(calls).splitlines()[-1:] == [lines[0].removeprefix("True ")]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--annotation ggroup.gmem.limit.high=12Q", "annotation ggroup.gmem.limit.high=12Q: GPU 0: Invalid argument"),
        ("--annotation ggroup.gmem.hihg=8G", "annotation ggroup.gmem.hihg: no such setting"),
        ("--device ggroup.io/gpu=0 -e GGROUP_GMEM_HIGH=12Q", "GGROUP_GMEM_HIGH=12Q: not a size"),
        (
            "--device ggroup.io/gpu=0 --annotation ggroup.GMemHigh=1M -e GGROUP_WEIGHT=0",
            "GGROUP_WEIGHT=0: not a number",
        ),
        ("--cgroups disabled --annotation ggroup.gmem.limit.high=1M", "the container has no cgroup of its own"),
    ],
)
def test_what_is_no_value_is_no_container(guest: Guest, options: str, reason: str) -> None:
    refused(guest, f"{options} new touch {RAN}/it")
    assert said(guest).startswith(reason)


def test_musl_is_refused_with_a_word(guest: Guest) -> None:
    refused(guest, f"--device ggroup.io/gpu=0 musl /bin/busybox touch {RAN}/it")
    musl = "the image has musl (/lib/ld-musl-x86_64.so.1) and no glibc, for which libggroup-cuda.so is\n"
    assert said(guest) == musl


def test_without_the_service_nothing_runs_unlimited(guest: Guest) -> None:
    guest.ok("systemctl stop ggroupfs")
    refused(guest, f"--annotation ggroup.gmem.limit.high=1G new touch {RAN}/it")
    assert said(guest) == "/run/ggroup: no ggroup tree is mounted there\n"
    assert "ggroup.io/gpu=0" in refused(guest, f"--device ggroup.io/gpu=0 new touch {RAN}/it").err


def test_a_container_goes_on_with_the_next_daemon(guest: Guest) -> None:
    """After an upgrade the limits are still there, and a new program in the container meets them at the new socket."""
    options = "--device ggroup.io/gpu=0 --annotation ggroup.gmem.limit.high=16M"
    guest.ok(f"{RUN} -d --name one {options} {TREE} --rootfs /srv/own sleep 1000")
    place = slice_of(guest, "one")
    guest.ok("ggroupfs upgrade /run/ggroup")
    assert guest.ok(f"cat {place}/0/gmem.limit.high") == f"{HIGH}\n"
    guest.ok(f"podman exec -d one {HOLDS}")
    guest.until(f"test $(cat {place}/0/gmem.current) = {HIGH}", "a program that came later is limited, too")


def test_a_thousand_containers_leave_nothing(guest: Guest) -> None:
    """Each has a limit by its annotation. crun is called directly: podman would only take most of the time."""
    guest.ok(f"{RUN.replace('run', 'create', 1)} --name model --annotation ggroup.gmem.limit.high=16M old true")
    guest.ok("podman init model")
    config = guest.ok("podman inspect -f '{{.OCIConfigPath}}' model").strip()
    before = guest.ok("find /sys/fs/cgroup -type d | wc -l")
    descriptors = "ls /proc/$(systemctl show -P MainPID ggroupfs)/fd | wc -l"
    open_before = int(guest.ok(descriptors))
    done = guest.run(f"python3 /mnt/many.py crun {config} {MANY} WITH", 900)
    why = "journalctl -q -t ggroupfs-hook -n 10; journalctl -q -u ggroupfs -n 20; systemctl show -P NRestarts ggroupfs"
    assert done.code == 0, (done, guest.run(why).out)
    took = json.loads(done.out)
    bare = json.loads(guest.ok(f"python3 /mnt/many.py crun {config} {MANY // 10} WITHOUT", 300))
    print(f"with the hook: {took}, without: {bare}")
    assert took["failed"] == bare["failed"] == 0
    guest.ok("podman rm -f -t 0 model; rmdir /sys/fs/cgroup/many.slice")
    guest.until(NO_SLICE, "no slice is left", GONE_S)
    assert guest.ok("find /run/ggroup/slice -mindepth 1 -maxdepth 1 -type d -not -name '[0-9]*'") == ""
    assert int(guest.ok("find /sys/fs/cgroup -type d | wc -l")) <= int(before)
    assert int(guest.ok(descriptors)) <= open_before + 8
