"""Errors that the command line reports."""


class UsageError(Exception):
    """A wrong command line; the text says what is wrong, in one line."""
