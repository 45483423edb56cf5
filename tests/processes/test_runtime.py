"""JAX's runtime was initialized, or JAX was used, before the strategy is made."""

import cluster
import training
from parity import assert_same


def test_a_runtime_of_ones_own_is_adopted_and_no_other_cluster(tmp_path):
    found = cluster.results(
        "runtime_worker.py", tmp_path, workers=2, devices=2, arguments=("adopted",)
    )
    want = training.run("data: arrays")
    for me, worker in enumerate(found):
        for name in ("with TF_CONFIG", "without"):
            assert_same(name, worker[name], want)
        assert "whose chief is at 127.0.0.1:" in worker["other chief"]
        assert "has joined its cluster already" in worker["option"]
        is_now = f"This process is worker {me} of 2 already"
        assert is_now in worker["other index"] and is_now in worker["other count"]
        assert f"worker {1 - me} of 2 (by TF_CONFIG)" in worker["other index"]
        assert f"worker {me} of 3 (by TF_CONFIG)" in worker["other count"]


def test_jax_that_was_used_before_is_said_on_every_worker(tmp_path):
    found = cluster.results(
        "runtime_worker.py", tmp_path, workers=2, devices=1, arguments=("used",)
    )
    for worker in found:
        assert "JAX has run something in this process already" in worker["used"]
        assert "at the top of the program" in worker["used"]
        assert "Received: coordinator='127.0.0.1:" in worker["used"]
