"""The network between two workers is cut in the middle of a fit."""

import contextlib
import re
import time

import cluster
import network
import pytest

HEARTBEAT_SECONDS = 10  # as fault_worker.py has it


@contextlib.contextmanager
def workers_that(arguments, folder, **options):
    workers = cluster.Cluster(
        "fault_worker.py", folder, workers=2, devices=1, arguments=arguments, **options
    )
    try:
        yield workers
    finally:
        workers.kill()


def wait_until_there(marker, workers, seconds=90):
    deadline = time.monotonic() + seconds
    while not marker.exists():
        assert time.monotonic() < deadline, workers.logs()
        time.sleep(0.05)


def assert_each_names_the_other(workers):
    """Both end by themselves, soon, and say of whom nothing was heard."""
    codes = workers.wait(2 * HEARTBEAT_SECONDS)
    assert 0 not in codes and None not in codes, workers.logs()
    silent = workers.log(0).partition("stopped sending heartbeats")[2]
    assert re.match(r"\W*1\b", silent), workers.logs()
    assert "worker 1 has heard nothing from worker 0, the chief at" in workers.log(1)


def test_workers_end_when_the_way_to_the_chief_is_cut(tmp_path):
    with (
        contextlib.closing(network.Forwarder()) as way,
        workers_that(["goes_on"], tmp_path, seen_at=way.leading_to) as workers,
    ):
        wait_until_there(tmp_path / "trains", workers)
        way.cut()
        assert_each_names_the_other(workers)


@pytest.mark.parametrize("victim", [0, 1], ids=["chief", "worker"])
def test_workers_end_when_one_is_cut_off(tmp_path, victim):
    """From all that others send: to the coordinator's port, and gloo's."""
    with workers_that(["deaf", str(victim)], tmp_path) as workers:
        wait_until_there(tmp_path / "cut", workers)
        assert_each_names_the_other(workers)
