"""Kills what workers have started where the launcher died and could not.

The kernel ends a worker with its launcher; what the worker itself has started (loaders
of data, commands) would live on. A small process beside the launcher reads the workers'
process groups from a pipe, and kills them when the pipe ends without a farewell.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from typing import IO

_FAREWELL = "done"


class Watchdog:
    """Watches from its beginning to `dismiss`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def watch(self, group: int) -> None:
        """Kills this process group where the launcher dies."""
        self._say(str(group))

    def dismiss(self) -> None:
        """The launcher has ended all groups itself."""
        self._say(_FAREWELL)
        with contextlib.suppress(OSError):
            self._pipe.close()
        self._process.wait()

    @property
    def _pipe(self) -> IO[str]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # it was killed: there is none then
            print(text, file=self._pipe, flush=True)


def main(lines: Iterable[str]) -> None:
    """Reads process groups until the pipe ends."""
    groups: list[int] = []
    for line in lines:
        if line.strip() == _FAREWELL:
            return
        groups.append(int(line))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.stdin)
