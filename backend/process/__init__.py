"""Processes as the kernel shows them: identity, state, exit, cgroup, and what is mapped in them."""
