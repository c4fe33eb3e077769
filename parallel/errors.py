"""Errors that speak to the user, each one sentence on stderr and an exit code; and the exit codes that no error stands for."""

HUNG = 70  # the watchdog ended a process that hung
STOPPED = 75  # stopped by a signal with everything saved: start again to go on


class UserError(ValueError):
    """A wrong flag, configuration or input: says what was asked, what is possible and what to change. Exit code 2."""

    code = 2


class CheckError(RuntimeError):
    """A checkpoint or check failed. Exit code 4."""

    code = 4


class FitError(UserError):
    """What was asked does not fit the devices. Exit code 3."""

    code = 3
