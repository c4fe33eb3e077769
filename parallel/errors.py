"""Errors that speak to the user; main.py turns each into one sentence on stderr and an exit code."""


class UserError(ValueError):
    """A wrong flag, configuration or input: says what was asked, what is possible and what to change. Exit code 2."""

    code = 2


class CheckError(RuntimeError):
    """A checkpoint or check failed. Exit code 4."""


class FitError(UserError):
    """What was asked does not fit the devices. Exit code 3."""

    code = 3
