"""One worker process: its start, its output, and its end."""

import collections
import contextlib
import io
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

from keras_mirror.errors import LaunchUsageError
from keras_mirror.launch import failure

_KEPT_LINES = 200
# Workers' lines are read by a thread each.
_saying = threading.Lock()
# What JAX says where gloo has lost the connection to another worker.
_LOST = re.compile(
    r"gloo.*connection (reset|closed) by peer", re.IGNORECASE | re.DOTALL
)
# What its runtime says before it ends a process since it hears nothing of others.
_DEAD = "another task died"
_SILENT = re.compile(r"stopped sending heartbeats\)?:?\s*((?:\d+[,\s]*)+)")
# And what keras_mirror says, where it is the chief.
_NO_CHIEF = re.compile(r"keras_mirror: worker \d+ has heard nothing from worker (\d+)")
# What keras_mirror raises where another worker is the cause.
_FOLLOWS = re.compile(
    r"WorkerFailedError: |WorkersDifferError: .*: the end of the program"
)


class Worker:
    """A process of its own process group, its output prefixed by its rank.

    Args:
        rank: Among all workers.
        arguments: The command line.
        environment: Its whole environment.
        log: Where its output is kept, or None.
        record: Where it may leave its `failure.Failure`.
    """

    def __init__(
        self,
        rank: int,
        arguments: list[str],
        environment: Mapping[str, str],
        log: pathlib.Path | None,
        record: pathlib.Path,
    ):
        self.rank = rank
        self.failure: failure.Failure | None = None
        # What ended it, where it was no worker that failed.
        self.lost_first: str | None = None
        self._record = record
        self.log = log
        self._kept = _open_log(log)
        self.ended_at: float | None = None
        self.lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._process = subprocess.Popen(
            arguments,
            env={**environment, failure.VARIABLE: str(record)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -N where signal N ended it."""
        return self._process.returncode

    def poll(self) -> int | None:
        """Looks whether it has ended."""
        code = self._process.poll()
        if code is not None and self.ended_at is None:
            self.ended_at = time.time()
        return code

    def failed_at(self) -> float | None:
        """When it raised, or ended with an error; None where it did neither."""
        self.failure = self.failure or failure.read(self._record)
        if self.failure is not None:
            return self.failure.at
        return self.ended_at if self.exit_code else None

    def has_lost_another(self) -> bool:
        """Whether it has ended since another worker was gone."""
        if self.failure is not None:
            text = self.failure.text
            return bool(_LOST.search(text) or _FOLLOWS.search(text))
        is_aborted = self.exit_code == -signal.SIGABRT
        return is_aborted and any(_DEAD in line for line in self.lines)

    def lost(self) -> set[int]:
        """The ranks of those that it has heard nothing of."""
        text = "\n".join(self.lines)
        named = [*_SILENT.findall(text), *_NO_CHIEF.findall(text)]
        return set(map(int, re.findall(r"\d+", " ".join(named))))

    def send(self, number: int) -> None:
        """Sends a signal to the worker and to what it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def finish(self) -> None:
        """Waits for the end of the process and of its output."""
        self._process.wait()
        self._reader.join(timeout=2)

    def _read(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        # Read to its end whatever happens: else the worker would wait for ever.
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(self._kept)
            for line in stream:
                try:
                    log.write(line)
                except OSError as error:  # the disk is full
                    say(f"{self.log} is not written any more: {error.strerror}")
                    log = stack.enter_context(_open_log(None))
                text = line.decode(errors="replace").rstrip("\n")
                self.lines.append(text)
                say(text, f"[{self.rank}]")


def say(text: str, who: str = "keras-mirror launch:") -> None:
    """A line on stderr, where that is still read."""
    with _saying, contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{who} {text}\n")
        sys.stderr.flush()


def _open_log(path: pathlib.Path | None) -> io.FileIO:
    """Where a worker's output is kept; None where it is not.

    Raises:
        LaunchUsageError: No file can be written there.
    """
    try:
        return open(path or os.devnull, "ab", buffering=0)
    except OSError as error:
        raise LaunchUsageError(
            "Each worker's output is kept in a file of log_dir. "
            f"Received: {str(path)!r} ({error.strerror})."
        ) from error


def in_words(exit_code: int) -> str:
    """An exit code as people say it."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"signal {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"signal {-exit_code}"
