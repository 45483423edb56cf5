"""Errors of the launcher. Apart from the others: those import Keras."""


class LaunchUsageError(ValueError):
    """A launch that was asked for wrongly."""


class LaunchFailedError(RuntimeError):
    """A worker failed; the launch has stopped the others.

    Attributes:
        exit_code: What the launcher ends with.
    """

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code
