"""The subcommands of `ggroupfs`, one module each, and the modules that only they use."""
