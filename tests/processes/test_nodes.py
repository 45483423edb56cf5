"""Two launchers on this machine, as two nodes: one job, one end."""

import contextlib
import pickle
import signal
import subprocess
import sys

import cluster
import training
from parity import assert_same

SCRIPT = str(cluster.HERE / "node_worker.py")


@contextlib.contextmanager
def nodes(folder, name):
    """The launchers of both nodes; neither outlives the test."""
    address = f"127.0.0.1:{cluster.free_ports(1)[0]}"
    common = ["--nodes", "2", "--coordinator", address, "--workers", "1"]
    common += ["--devices-per-worker", "1"]
    launch = [sys.executable, "-m", "keras_mirror", "launch", *common]
    started = [
        subprocess.Popen(
            [*launch, "--node-rank", str(rank), SCRIPT, str(folder), name],
            env=cluster.environment(1),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)  # on to its workers
            process.communicate(timeout=20)


def ends(launchers, seconds):
    """Exit codes and what was said."""
    said = [process.communicate(timeout=seconds)[1] for process in launchers]
    return [process.returncode for process in launchers], said


def test_two_nodes_train_as_one_device(tmp_path):
    with nodes(tmp_path, "trains") as launchers:
        codes, said = ends(launchers, 120)
    assert codes == [0, 0], said
    for index in (0, 1):
        with open(tmp_path / f"result{index}.pickle", "rb") as file:
            assert_same("workers", pickle.load(file), training.run("data: arrays"))


def test_a_failure_on_one_node_ends_the_other(tmp_path):
    with nodes(tmp_path, "fails") as launchers:
        codes, said = ends(launchers, 120)
    assert 0 not in codes, said
    for rank, text in enumerate(said):
        assert f"worker {rank} failed first: host" in text
        assert "ValueError: the disk is full" in text
    assert "worker 1 has failed" in said[0]
