"""The daemon of one mount: its options, its life from mount to unmount, and its watchdog."""
