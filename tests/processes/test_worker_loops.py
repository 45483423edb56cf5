"""Whole programs over two workers: a loop of one's own, and TensorFlow's tutorial."""

import cluster
import numpy as np
import training
from parity import assert_same


def test_a_loop_of_ones_own_matches_one_device(tmp_path):
    found = cluster.results("loop_worker.py", tmp_path, workers=2, devices=2)
    assert_same("worker", found[1], found[0], 0)
    training.keras.utils.set_random_seed(7)
    model = training.compiled(training.mlp())
    x, y = training.X[:24], training.Y[:24]
    losses = [
        model.train_on_batch(x[i : i + 8], y[i : i + 8], return_dict=True)["loss"]
        for i in (0, 8, 16)
        if not model.reset_metrics()
    ]
    assert_same("losses", found[0]["losses"], losses)
    assert_same("weights", found[0]["weights"], model.get_weights())
    assert_same("gathered", np.concatenate(found[0]["gathered"]), y)
    assert_same("total", found[0]["total"], y.sum())
    assert found[0]["rows"] == 24 and found[0]["mean"] == 3.0
    assert len(found[0]["values"]) == 4
    assert_same("mean of values", np.mean(found[0]["values"]), losses[-1])


def test_the_tutorial_of_tensorflow_trains(tmp_path):
    found = cluster.results(
        "tutorial_worker.py",
        tmp_path,
        workers=2,
        devices=1,
        needs=["tensorflow", "sklearn"],
    )
    assert_same("worker", found[1], found[0], 0)
    for index in (0, 1):  # its shuffle has no seed
        log = (tmp_path / f"worker{index}.log").read_text()
        assert log.count(": DifferentBatchesWarning: ") == 1
    accuracy = found[0]["history"]["accuracy"]
    assert accuracy[-1] > 0.8 and accuracy[-1] > accuracy[0]
    loaded = training.keras.models.load_model(tmp_path / "model.keras")
    assert_same("saved", loaded.get_weights(), found[0]["weights"], 0)
