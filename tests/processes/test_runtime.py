"""JAX's runtime was initialized, or JAX was used, before the strategy is made."""

import cluster
import pytest
import training
from parity import assert_same


@pytest.fixture(scope="module")
def adopted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adopted")
    return cluster.results(
        "runtime_worker.py", folder, workers=2, devices=2, arguments=("adopted",)
    )


@pytest.mark.parametrize("name", ["with TF_CONFIG", "without"])
def test_a_runtime_of_ones_own_is_adopted(adopted, name):
    assert_same("worker", adopted[1][name], adopted[0][name], 0)
    assert_same("workers", adopted[0][name], training.run("data: arrays"))


def test_a_cluster_that_is_not_the_runtimes_is_refused(adopted):
    for me, found in enumerate(adopted):
        is_now = f"This process is worker {me} of 2 already"
        assert is_now in found["other index"] and is_now in found["other count"]
        assert f"worker {1 - me} of 2 (by TF_CONFIG)" in found["other index"]
        assert f"worker {me} of 3 (by TF_CONFIG)" in found["other count"]


def test_jax_that_was_used_before_is_said_on_every_worker(tmp_path):
    found = cluster.results(
        "runtime_worker.py", tmp_path, workers=2, devices=1, arguments=("used",)
    )
    for worker in found:
        assert "JAX has run something in this process already" in worker["used"]
        assert "at the top of the program" in worker["used"]
        assert "Received: coordinator='127.0.0.1:" in worker["used"]
