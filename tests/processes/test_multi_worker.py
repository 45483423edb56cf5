"""Real worker processes train as one device does, and as each other."""

import os
import pickle

import cluster
import filelock
import parts
import pytest
import training
from parity import assert_same

# Each start of a worker costs seconds, so one run of the workers does them all.
SOME = ["data: shuffled", "data: tf.data", "data: generator", "masks", "on_batch"]
ALL_DATA = [f"data: {name}" for name in training.DATA] + ["masks", "on_batch"]


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
            options["needs"] = ["tensorflow", "torch"]
            found = cluster.results("train_worker.py", own, **options)
            kept.write_bytes(pickle.dumps(found))
    return pickle.loads(kept.read_bytes())


@pytest.fixture(scope="session")
def two_by_two(tmp_path_factory):
    return once(tmp_path_factory, "two_by_two", workers=2, devices=2, seconds=400)


@pytest.fixture(scope="session")
def one_and_three(tmp_path_factory):
    options = {"workers": 2, "devices": [1, 3], "arguments": SOME}
    return once(tmp_path_factory, "one_and_three", **options)


@pytest.fixture(scope="session")
def four_by_one(tmp_path_factory):
    options = {"workers": 4, "devices": 1, "arguments": ALL_DATA}
    return once(tmp_path_factory, "four_by_one", **options)


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


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.filterwarnings("ignore:.shuffle=True. was passed:UserWarning")
@pytest.mark.parametrize("name", ALL_DATA)
def test_four_workers_match_one_device(name, four_by_one):
    check(four_by_one, name)


@pytest.mark.filterwarnings("ignore:.shuffle=True. was passed:UserWarning")
@pytest.mark.parametrize("name", SOME)
def test_workers_with_unequally_many_devices_match_one_device(name, one_and_three):
    check(one_and_three, name)


@pytest.fixture(scope="session")
def one_device():
    return parts.on_one_device()


@pytest.mark.parametrize("name", [f"files: {name}" for name in parts.FILES])
def test_workers_with_files_of_their_own_match_one_device(name, two_by_two, one_device):
    expected = one_device[name]
    for worker, result in enumerate(two_by_two):
        assert not isinstance(result[name], str), result[name]
        own = expected | {"predict": expected["predict"][worker]}
        assert_same("worker", result[name], own)


@pytest.mark.parametrize("name", parts.REFUSED)
def test_data_without_enough_files_are_refused_on_every_worker(name, two_by_two):
    for result in two_by_two:
        said = result[f"refused: {name}"]
        assert "FileShardError" in said and parts.REFUSED[name][1] in said, said


@pytest.mark.parametrize("name", parts.PARTED)
def test_workers_that_read_their_part_match_one_device(name, two_by_two, one_device):
    for result in two_by_two:
        found = result[f"parts: {name}"]
        assert not isinstance(found, str), found
        assert_same("worker", found, one_device[f"parts: {name}"])
    mine, others = (set(result[f"rows read: {name}"]) for result in two_by_two)
    # torch fetches one row where a part of the last batch, of one row, has none.
    assert len(mine) <= len(others) and mine & others <= {25}
    assert mine | others == set(one_device[f"rows read: {name}"])


def test_workers_that_shuffle_apart_are_warned_once_a_fit(two_by_two):
    for result in two_by_two:
        assert result["warned"] == [1, 0], result["warned"]  # seeded apart, alike
