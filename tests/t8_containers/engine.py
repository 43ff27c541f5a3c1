"""Podman in the container of the tests: what it is configured with, and what is asked of the machine."""

from __future__ import annotations

IMAGES = ("old", "new", "musl")
"""Images, by the names that tests/t8_containers/containers.mk gives them."""
CONFIGURED = """\
[containers]
pids_limit = 0
default_sysctls = []
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
"""
"""What root of the test's machine may not have is not asked for (containers.conf(5)): its cgroups may lack a controller
on a host that is hybrid, and its /proc/sys is read-only."""
NO_SLICE = "! grep . /run/ggroup/ggroup.slices"
"""Succeeds where the tree has no slice."""
GONE_S = 60.0
"""Seconds that a slice may outlive what it was of."""
