"""Runs one job: all workers of this node, until they end or one fails."""

import pathlib
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

from keras_mirror.errors import LaunchFailedError, LaunchUsageError, PreemptedExit
from keras_mirror.launch.config import LaunchConfig, free_address
from keras_mirror.launch.watchdog import Watchdog
from keras_mirror.launch.worker import Worker, in_words, say

_POLL_SECONDS = 0.05
# When one worker dies the others often end as well, of its death. Those who end
# within this time are looked at together, and the earliest is the cause.
_SETTLE_SECONDS = 0.5
# Between the end of a job and its next start.
_PAUSE_SECONDS = 1.0
_LAST_LINES = 20
_PASSED_ON = (signal.SIGINT, signal.SIGTERM)


def launch(config: LaunchConfig) -> None:
    """Runs the workers of this node to their end.

    Raises:
        LaunchFailedError: A worker failed, and no restart was left. The message
            names the first that did: rank, host, pid, how it ended, its last lines
            and its log.
    """
    restarts = 0
    while True:
        failed = _Attempt(config).run()
        if failed is None:
            return
        code = failed.exit_code or 0
        if code == PreemptedExit.EXIT_CODE:
            say(f"worker {failed.rank} was preempted; starting again")
            time.sleep(_PAUSE_SECONDS)
            continue
        if restarts >= config.max_restarts:
            raise LaunchFailedError(_report(failed), code if code > 0 else 128 - code)
        restarts += 1
        say(f"{_report(failed)}\nrestart {restarts} of {config.max_restarts}")
        time.sleep(_PAUSE_SECONDS)


def _report(worker: Worker) -> str:
    code = worker.exit_code or 0
    lines = list(worker.lines)[-_LAST_LINES:]
    where = f"\n  log: {worker.log}" if worker.log is not None else ""
    what = "last lines"
    if worker.failure is not None:
        what, lines = "error", worker.failure.text.splitlines()
    said = "".join(f"\n  | {line}" for line in lines)
    lost = ""
    if worker.lost_first is not None:
        lost = f"{worker.lost_first} was gone, and so "
    return (
        f"{lost}worker {worker.rank} failed first: host {socket.gethostname()}, pid "
        f"{worker.pid}, {in_words(code)}{where}\n  its {what}:{said}"
    )


class _Attempt:
    """The workers from one start to their end."""

    def __init__(self, config: LaunchConfig):
        self._config = config
        self._workers: list[Worker] = []
        self._watchdog = Watchdog()
        self._signal: int | None = None

    def run(self) -> Worker | None:
        """Returns the worker that failed first, None where all ended well."""
        before = {}
        if threading.current_thread() is threading.main_thread():
            before = {n: signal.signal(n, self._note) for n in _PASSED_ON}
        try:
            with tempfile.TemporaryDirectory(prefix="keras_mirror_") as records:
                self._start(pathlib.Path(records))
                failed = self._watch()
        finally:
            self._stop()
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._signal is not None:
            name = signal.Signals(self._signal).name
            if failed is None or failed.exit_code != PreemptedExit.EXIT_CODE:
                code = 128 + self._signal
                raise LaunchFailedError(f"stopped by {name}", code)
            raise LaunchFailedError(
                f"saved and stopped by {name}", PreemptedExit.EXIT_CODE
            )
        return failed

    def _note(self, number: int, _: FrameType | None) -> Any:
        self._signal = number

    def _start(self, records: pathlib.Path) -> None:
        config = self._config
        coordinator = config.coordinator or free_address()
        folder = None
        if config.log_dir is not None:
            folder = pathlib.Path(config.log_dir)
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise LaunchUsageError(
                    "log_dir must be a folder, or a place for one. "
                    f"Received: {str(folder)!r} ({error.strerror})."
                ) from error
        for local in range(config.workers):
            rank = config.rank(local)
            log = folder / f"rank{rank}.log" if folder is not None else None
            environment = config.worker_environment(local, coordinator)
            record = records / f"rank{rank}.json"
            worker = Worker(rank, config.arguments(), environment, log, record)
            self._workers.append(worker)
            self._watchdog.watch(worker.pid)

    def _watch(self) -> Worker | None:
        while True:
            if self._signal is not None:
                return self._pass_on(self._signal)
            codes = [worker.poll() for worker in self._workers]
            if any(codes):
                self._wait(_SETTLE_SECONDS)
                return self._first_failed()
            if all(code is not None for code in codes):
                return None
            time.sleep(_POLL_SECONDS)

    def _first_failed(self) -> Worker | None:
        failed = self._failed()
        if not failed:
            return None
        causes = self._causes(failed)
        if not causes:
            # Who was lost may wait for these until they are gone.
            self._wait(self._config.grace_seconds)
            failed = self._failed()
            causes = self._causes(failed)
        first = min(causes or failed, key=failed.__getitem__)
        if not causes:
            first.lost_first = self._lost_by(first)
        # One that has raised may wait for the others until they are gone.
        self._wait(self._config.grace_seconds, [first])
        return first

    def _failed(self) -> dict[Worker, float]:
        """Those that failed, and when."""
        times = {worker: worker.failed_at() for worker in self._workers}
        return {worker: at for worker, at in times.items() if at is not None}

    @staticmethod
    def _causes(failed: Mapping[Worker, float]) -> list[Worker]:
        """Those that failed by themselves."""
        return [worker for worker in failed if not worker.has_lost_another()]

    def _lost_by(self, worker: Worker) -> str | None:
        """Who ended without an error, or stands still, where that ended a worker."""
        others = [other for other in self._workers if other is not worker]
        ended = [f"worker {o.rank} (exit code 0)" for o in others if o.exit_code == 0]
        silent = [
            f"worker {other.rank} (pid {other.pid}, which stands still)"
            for other in others
            if other.exit_code is None and other.rank in worker.lost()
        ]
        return " and ".join(ended + silent) or None

    def _pass_on(self, number: int) -> Worker | None:
        """Gives the workers the signal, and the time to save and end."""
        for worker in self._workers:
            worker.send(number)
        self._wait(self._config.grace_seconds)
        return self._first_failed()

    def _wait(self, seconds: float, workers: list[Worker] | None = None) -> None:
        """Until all of them have ended, or it has been so long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if all(worker.poll() is not None for worker in workers or self._workers):
                return
            time.sleep(_POLL_SECONDS)

    def _stop(self) -> None:
        """Ends what still runs: asks, waits, kills."""
        running = [worker for worker in self._workers if worker.poll() is None]
        for worker in running:
            worker.send(signal.SIGTERM)
        self._wait(self._config.grace_seconds)
        for worker in self._workers:
            worker.send(signal.SIGKILL)  # and what it may have left behind
        for worker in self._workers:
            worker.finish()
            worker.poll()
        self._watchdog.dismiss()
