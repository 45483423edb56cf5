"""Real worker processes train as one device does, and as each other."""

import cluster
import pytest
import training
from parity import assert_same

# Each start of a worker costs seconds, so one run of the workers does them all.
SOME = ["data: shuffled", "data: tf.data", "data: generator", "masks", "on_batch"]


@pytest.fixture(scope="session")
def two_by_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_by_two")
    return cluster.results("train_worker.py", folder, workers=2, devices=2)


@pytest.fixture(scope="session")
def four_by_one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four_by_one")
    return cluster.results(
        "train_worker.py", folder, workers=4, devices=1, arguments=SOME
    )


def check(found, name):
    for result in found:
        assert not isinstance(result[name], str), result[name]
    for other in found[1:]:
        assert_same("worker", other[name], found[0][name], 0)
    assert_same("workers", found[0][name], training.run(name))


@pytest.mark.xdist_group("two_by_two")
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.filterwarnings("ignore:.shuffle=True. was passed:UserWarning")
@pytest.mark.parametrize("name", training.PROGRAMS)
def test_two_workers_with_two_devices_match_one_device(name, two_by_two):
    check(two_by_two, name)


@pytest.mark.xdist_group("four_by_one")
@pytest.mark.filterwarnings("ignore:.shuffle=True. was passed:UserWarning")
@pytest.mark.parametrize("name", SOME)
def test_four_workers_match_one_device(name, four_by_one):
    check(four_by_one, name)
