"""Processes as the kernel shows them: identity, state, exit, cgroup, and mapped files."""
