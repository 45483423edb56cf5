"""What to launch, and each worker's environment."""

import contextlib
import os
import pathlib
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from keras_mirror.cluster.spec import is_address
from keras_mirror.errors import LaunchUsageError

DEVICE_FLAG = "--xla_force_host_platform_device_count"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class LaunchConfig:
    """One launch.

    Attributes:
        command: The script and its arguments, or ["-m", module, ...].
        workers: Processes on this node.
        devices_per_worker: Virtual CPU devices of each, None to leave it to JAX.
        nodes: How many nodes run such a launcher.
        node_rank: Which of them this is.
        coordinator: "host:port" of node 0; None picks a free port on loopback.
        max_restarts: How often a failed job is started again.
        log_dir: Where each worker's output is kept as rank<k>.log.
        grace_seconds: Between asking a worker to stop and killing it.
    """

    command: Sequence[str]
    workers: int = 1
    devices_per_worker: int | None = None
    nodes: int = 1
    node_rank: int = 0
    coordinator: str | None = None
    max_restarts: int = 0
    log_dir: str | os.PathLike[str] | None = None
    grace_seconds: float = 5.0
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def __post_init__(self) -> None:
        if not self.command:
            raise LaunchUsageError("There must be a script to launch. Received none.")
        smallest = {"workers": 1, "nodes": 1, "max_restarts": 0}
        if self.devices_per_worker is not None:
            smallest["devices_per_worker"] = 1
        for name, least in smallest.items():
            value = getattr(self, name)
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if not is_number or value < least:
                raise LaunchUsageError(
                    f"{name} must be a whole number of at least {least}. "
                    f"Received: {value!r}."
                )
        if self.node_rank not in range(self.nodes):
            raise LaunchUsageError(
                f"node_rank must be from 0 to {self.nodes - 1}. "
                f"Received: {self.node_rank!r}."
            )
        if self.nodes > 1 and self.coordinator is None:
            raise LaunchUsageError(
                "Several nodes meet at one address: pass the coordinator as HOST:PORT "
                f"of node 0. Received: nodes={self.nodes}, coordinator=None."
            )
        if self.coordinator is not None and not is_address(self.coordinator):
            raise LaunchUsageError(
                "coordinator must be HOST:PORT, with a port from 1 to 65535. "
                f"Received: {self.coordinator!r}."
            )
        if not isinstance(self.log_dir, (str, os.PathLike, type(None))):
            raise LaunchUsageError(
                f"log_dir must be a path, or None. Received: {self.log_dir!r}."
            )
        script = self.command[0]
        if script != "-m" and not pathlib.Path(script).is_file():
            raise LaunchUsageError(f"There is no script {script!r}.")

    @property
    def num_workers(self) -> int:
        """Of all nodes."""
        return self.workers * self.nodes

    def rank(self, local: int) -> int:
        """Of a worker of this node, among all nodes."""
        return self.node_rank * self.workers + local

    def arguments(self) -> list[str]:
        """The command line of a worker."""
        return [sys.executable, "-u", *self.command]

    def worker_environment(self, local: int, coordinator: str) -> dict[str, str]:
        """The environment of one worker."""
        found = dict(self.environment)
        found.pop("TF_CONFIG", None)  # a cluster that this process is in, not these
        found |= {
            "KERAS_DISTRIBUTION_JOB_ADDRESSES": coordinator,
            "KERAS_DISTRIBUTION_NUM_PROCESSES": str(self.num_workers),
            "KERAS_DISTRIBUTION_PROCESS_ID": str(self.rank(local)),
        }
        if self.devices_per_worker is not None:
            flags = found.get("XLA_FLAGS", "").split()
            flags = [flag for flag in flags if not flag.startswith(DEVICE_FLAG)]
            flags.append(f"{DEVICE_FLAG}={self.devices_per_worker}")
            found["XLA_FLAGS"] = " ".join(flags)
        return found


def free_address() -> str:
    """A port on this machine alone that nobody listens to."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind((LOOPBACK, 0))
        return f"{LOOPBACK}:{probe.getsockname()[1]}"
