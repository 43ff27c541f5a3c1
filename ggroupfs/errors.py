"""What the command line is told."""


class UsageError(Exception):
    """The command line is wrong; the text says how, in one line."""
