"""Jobs of real worker processes, all alive at once and working one at a time.

A job waits for its turn in a read of stdin, so the rounds of several jobs can be
interleaved: whatever else the machine does within a second or so, it does to all.
"""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import environment

# What a worker's "ping" reduces, one after the other.
PING_BYTES = (1 << 10, 1 << 22)
SCRIPT = pathlib.Path(__file__).with_name("scaling_worker.py")


@dataclass(frozen=True)
class Layout:
    """How many processes, and how many devices each has."""

    workers: int
    devices: int

    @property
    def replicas(self) -> int:
        return self.workers * self.devices

    def __str__(self) -> str:
        return f"{self.workers}x{self.devices}"


def parse_layouts(text: str) -> list[Layout]:
    """ "2x1,2x2" -> two layouts; "none" -> none."""
    parts = [] if text == "none" else text.split(",")
    return [Layout(*map(int, part.split("x"))) for part in parts]


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class Job(contextlib.AbstractContextManager["Job"]):
    """Workers that run `scaling_worker.py`; killed at the end.

    Args:
        layout: How many processes and devices.
        arguments: Of the script.
    """

    def __init__(self, layout: Layout, arguments: list[str]):
        self.layout = layout
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in __exit__
        hosts = [f"127.0.0.1:{port}" for port in free_ports(layout.workers)]
        self._workers = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), *arguments],
                env=self._environment(hosts, index),
                stdin=subprocess.PIPE,
                # The others have nothing to say, and nobody reads them.
                stdout=self._log if index else subprocess.PIPE,
                stderr=self._log,
                text=True,
                start_new_session=True,
            )
            for index in range(layout.workers)
        ]

    def _environment(self, hosts: list[str], index: int) -> dict[str, str]:
        task = {"type": "worker", "index": index}
        return os.environ | {
            "TF_CONFIG": json.dumps({"cluster": {"worker": hosts}, "task": task}),
            "XLA_FLAGS": f"{environment.DEVICE_COUNT_FLAG}={self.layout.devices}",
        }

    def ask(self, what: str) -> Any:
        """Lets all workers do something, and waits for what worker 0 answers."""
        for worker in self._workers:
            print(what, file=worker.stdin, flush=True)
        return self.answer()

    def answer(self) -> Any:
        """The next answer.

        Raises:
            RuntimeError: The job has ended; its last lines are in the message.
        """
        for line in self._workers[0].stdout or ():
            with contextlib.suppress(json.JSONDecodeError):  # what gloo prints
                return json.loads(line)
        self._log.seek(0)
        raise RuntimeError(
            f"The job of {self.layout} processes has ended:\n{self._log.read()[-4000:]}"
        )

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        self._log.close()
