"""Level 4: real mounts, each served by a daemon of its own, with real processes."""
