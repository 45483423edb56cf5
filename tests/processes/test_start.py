"""Workers that are seeded apart start, and go on, as the chief does."""

import cluster
import pytest
from parity import assert_same


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    return cluster.results("start_worker.py", folder, workers=2, devices=1)


@pytest.mark.parametrize("what", ["at compile", "after fit", "drawn", "built late"])
def test_every_worker_has_what_the_chief_has(workers, what):
    chief, other = workers
    assert_same(what, other[what], chief[what], 0)
