"""Real worker processes train as one device does, and as each other."""

import os
import pickle

import cluster
import filelock
import pytest
import training
from parity import assert_same

# Each start of a worker costs seconds, so one run of the workers does them all.
SOME = ["data: shuffled", "data: tf.data", "data: generator", "masks", "on_batch"]


def once(tmp_path_factory, name, **options):
    """What the workers found; they run once for all processes of pytest-xdist."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    kept = folder / f"{name}.pickle"
    with filelock.FileLock(folder / f"{name}.lock"):
        if not kept.exists():
            own = folder / name
            own.mkdir(exist_ok=True)
            found = cluster.results("train_worker.py", own, **options)
            kept.write_bytes(pickle.dumps(found))
    return pickle.loads(kept.read_bytes())


@pytest.fixture(scope="session")
def two_by_two(tmp_path_factory):
    return once(tmp_path_factory, "two_by_two", workers=2, devices=2)


@pytest.fixture(scope="session")
def four_by_one(tmp_path_factory):
    return once(tmp_path_factory, "four_by_one", workers=4, devices=1, arguments=SOME)


def check(found, name):
    for result in found:
        assert not isinstance(result[name], str), result[name]
    for other in found[1:]:
        assert_same("worker", other[name], found[0][name], 0)
    assert_same("workers", found[0][name], training.run(name))


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.filterwarnings("ignore:.shuffle=True. was passed:UserWarning")
@pytest.mark.parametrize("name", training.PROGRAMS)
def test_two_workers_with_two_devices_match_one_device(name, two_by_two):
    check(two_by_two, name)


@pytest.mark.filterwarnings("ignore:.shuffle=True. was passed:UserWarning")
@pytest.mark.parametrize("name", SOME)
def test_four_workers_match_one_device(name, four_by_one):
    check(four_by_one, name)
