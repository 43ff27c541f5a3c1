"""The subcommands of `ggroupfs`, one module each, and what only they use."""
