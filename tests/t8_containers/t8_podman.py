"""Limits of containers of podman with crun: by the environment, by annotations, by a device, and what is refused."""

from __future__ import annotations

import json

import pytest

from tests.container.guest import Completed, Guest
from tests.t8_containers.engine import GONE_S, NO_SLICE

MIB = 1 << 20
HIGH = 16 * MIB
"""Limit of the containers."""
RUN = "podman run --privileged --network none"
"""A container of podman that asks for no right that root of the test's machine may not have."""
TREE = "-v /run/ggroup-shared:/run/ggroup-shared:ro,rslave"
HOLDS = "ggroupfs tenant --mount /run/ggroup-shared/tree --gmem 32M --report 1"
"""A program of the software GPU that holds twice as much, where the command is and the tree."""
RAN = "/run/ran"
MARKED = f"-v {RAN}:{RAN}"
MANY = 1000
"""Containers that come and go."""


def slice_of(guest: Guest, name: str) -> str:
    """The slice of a container that runs, in the tree."""
    pid = guest.ok(f"podman inspect -f '{{{{.State.Pid}}}}' {name}").strip()
    return "/run/ggroup/slice" + guest.ok(f"sed -n s/^0:://p /proc/{pid}/cgroup").strip()


def refused(guest: Guest, words: str) -> Completed:
    """What podman says of a container that does not start; its program has not run."""
    guest.ok(f"rm -rf {RAN} && mkdir {RAN}")
    done = guest.run(f"{RUN} --rm {MARKED} {words}")
    assert done.code != 0, done
    assert guest.ok(f"ls {RAN}") == ""
    guest.until('test -z "$(podman ps -aq)"', "the container is gone")
    return done


def said(guest: Guest) -> str:
    """The last line of the hook in the journal."""
    return guest.ok("journalctl -q -t ggroupfs-hook -n 1 -o cat")


def test_what_is_installed(guest: Guest) -> None:
    """One command, and nothing by hand: a hook, and the devices, which go with the service."""
    assert guest.ok("systemctl is-active ggroupfs-cdi") == "active\n"
    devices = json.loads(guest.ok("cat /run/cdi/ggroupfs.json"))["devices"]
    assert [one["name"] for one in devices] == ["0", "all"]
    assert guest.ok("systemctl --failed --plain --no-legend") == ""
    guest.ok("systemctl stop ggroupfs")
    assert guest.run("test -e /run/cdi/ggroupfs.json").code == 1
    guest.ok("systemctl start ggroupfs")
    guest.until("test -e /run/cdi/ggroupfs.json", "the devices are back")


def test_by_the_environment(guest: Guest) -> None:
    """The program and its children are a family below the cgroup of the container."""
    guest.ok(f"{RUN} -d --name one --device ggroup.io/gpu=0 -e GGROUP_GMEM_HIGH=16M {TREE} --rootfs /srv/own {HOLDS}")
    place = f"{slice_of(guest, 'one')}/family-0-*/0"
    guest.until(f"test $(cat {place}/gmem.current) = {HIGH}", "the family is at its limit")
    assert guest.ok(f"cat {place}/gmem.limit.high") == f"{HIGH}\n"


@pytest.mark.parametrize("annotation", ["ggroup.gmem.limit.high=16M", "ggroup.GMemHigh=16M"])
def test_by_an_annotation(guest: Guest, annotation: str) -> None:
    """The slice of the cgroup has the limit before the program runs, and goes with the cgroup."""
    options = f"--name one --device ggroup.io/gpu=all --annotation {annotation} --annotation ggroup.compute.weight=30"
    guest.ok(f"{RUN} -d {options} {TREE} --rootfs /srv/own {HOLDS}")
    place = slice_of(guest, "one")
    assert guest.ok(f"cat {place}/0/gmem.limit.high {place}/0/compute.weight") == f"{HIGH}\n30\n"
    guest.until(f"test $(cat {place}/0/gmem.current) = {HIGH}", "the container is at its limit")
    guest.ok("podman rm -f -t 0 one")
    guest.until(f"test ! -e {place}", "the slice goes with the cgroup")


def test_runc_calls_the_hook_as_well(guest: Guest) -> None:
    """The runtime of containerd and of Docker."""
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
    """It is in the program with all that it asks for (-z now), and has read its environment, of which it tells the
    children."""
    script = (
        'import os; is_in = "libggroup-cuda.so" in open("/proc/self/maps").read();'
        'print(is_in, os.confstr("CS_GNU_LIBC_VERSION"), flush=True); os.execlp("env", "env")'
    )
    options = "--rm --device ggroup.io/gpu=all -e GGROUP_GMEM_HIGH=1G"
    lines = guest.ok(f"{RUN} {options} {image} python3 -c '{script}'").splitlines()
    assert lines[0] == f"True glibc {'2.31' if image == 'old' else '2.36'}"
    assert any(line.startswith("GGROUP_FAMILY=") and line.endswith(":high=1073741824") for line in lines)
    assert "GGROUP_SOCKET=/run/ggroupfs/ggroup.sock" in lines
    # On a double of the driver: its calls are found and made, and those that the library catches are the library's.
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
    """Its limits are there, and its program, which was in a family, can be so again: the socket is another."""
    options = "--device ggroup.io/gpu=0 --annotation ggroup.gmem.limit.high=16M"
    guest.ok(f"{RUN} -d --name one {options} {TREE} --rootfs /srv/own sleep 1000")
    place = slice_of(guest, "one")
    guest.ok("ggroupfs upgrade /run/ggroup")
    assert guest.ok(f"cat {place}/0/gmem.limit.high") == f"{HIGH}\n"
    guest.ok(f"podman exec -d one {HOLDS}")
    guest.until(f"test $(cat {place}/0/gmem.current) = {HIGH}", "a program that came later is limited, too")


def test_a_thousand_containers_leave_nothing(guest: Guest) -> None:
    """Each with a limit by its annotation, by crun alone: podman would take most of the time, and change nothing."""
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
