"""Podman in the container of the tests: its configuration, and commands that ask for the state of the guest."""

from __future__ import annotations

IMAGES = ("old", "new", "musl")
"""The images, by the names that tests/t8_containers/containers.mk gives them."""
CONFIGURED = """\
[containers]
pids_limit = 0
default_sysctls = []
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
"""
"""Leaves out what root in the test's container may not set (containers.conf(5)): on a hybrid host a controller may be
missing from its cgroups, and its /proc/sys is read-only."""
NO_SLICE = "! grep . /run/ggroup/ggroup.slices"
"""Succeeds if the tree has no slice."""
GONE_S = 60.0
"""Seconds that a slice may outlive its cgroup."""
