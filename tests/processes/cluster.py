"""Starts real worker processes and waits for them, never for ever."""

import contextlib
import json
import os
import pathlib
import pickle
import signal
import socket
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[2]
HERE = pathlib.Path(__file__).parent
FLAG = "--xla_force_host_platform_device_count"
QUICK = "--xla_cpu_use_fusion_emitters=false"  # see tests/conftest.py


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def environment(devices, *, needs=(), as_users_do=False):
    """Of a worker: this checkout, and so many virtual devices.

    It has no TensorFlow, no torch and no matplotlib (see `bare`) but what it `needs`.
    Programs are compiled quickly, not to be quick; `as_users_do` leaves XLA as it is.
    """
    found = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TF_CONFIG", "KERAS_DISTRIBUTION", "KERAS_MIRROR"))
    }
    folders = [HERE / "bare", ROOT, HERE, ROOT / "tests" / "jax"]
    return found | {
        "KERAS_BACKEND": "jax",
        "XLA_FLAGS": f"{FLAG}={devices}" + (not as_users_do) * f" {QUICK}",
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "BARE_BUT_FOR": ",".join(needs),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


class Cluster:
    """Worker processes that run one script; kills what is left at the end.

    The others see the chief at `seen_at(its port)`, where that is given.
    """

    def __init__(
        self,
        script,
        folder,
        *,
        workers,
        devices,
        arguments=(),
        seen_at=None,
        more=None,
        **options,
    ):
        self.folder = pathlib.Path(folder)
        ports = free_ports(workers)
        self.processes = []
        counts = devices if isinstance(devices, list) else [devices] * workers
        for index in range(workers):
            if index == 1 and seen_at is not None:
                ports[0] = seen_at(ports[0])
            hosts = [f"127.0.0.1:{port}" for port in ports]
            task = {"type": "worker", "index": index}
            config = {"cluster": {"worker": hosts}, "task": task}
            with open(self.log_path(index), "wb") as log:
                process = subprocess.Popen(
                    [sys.executable, str(HERE / script), str(folder), *arguments],
                    env=environment(counts[index], **options)
                    | {"TF_CONFIG": json.dumps(config)}
                    | (more or {}),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self.processes.append(process)

    def log_path(self, index):
        return self.folder / f"worker{index}.log"

    def log(self, index):
        return self.log_path(index).read_text(errors="replace")

    def wait(self, seconds):
        """Exit codes; None for a worker that had to be killed."""
        deadline = time.monotonic() + seconds
        codes = []
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.1, deadline - time.monotonic()))
            codes.append(process.poll())
        self.kill()
        return codes

    def kill(self):
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def logs(self):
        return "\n".join(
            f"--- worker {index}\n{self.log(index)[-6000:]}"
            for index in range(len(self.processes))
        )


def results(script, folder, *, workers, devices, seconds=240, **options):
    """What each worker has pickled; fails with the logs where one has failed."""
    cluster = Cluster(script, folder, workers=workers, devices=devices, **options)
    codes = cluster.wait(seconds)
    assert codes == [0] * workers, f"exit codes {codes}\n{cluster.logs()}"
    found = []
    for index in range(workers):
        with open(pathlib.Path(folder) / f"result{index}.pickle", "rb") as file:
            found.append(pickle.load(file))
    return found


def save(folder, index, value):
    with open(pathlib.Path(folder) / f"result{index}.pickle", "wb") as file:
        pickle.dump(value, file)
