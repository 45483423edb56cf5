"""Orbax under two workers: one path for all, and the weights of one device."""

import cluster
import pytest
import training
from parity import assert_same


def fit(model, epochs):
    x, y = training.X[:24], training.Y[:24]
    model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return model.get_weights()


def one_device():
    """The weights that are saved, and those an epoch later."""
    training.keras.utils.clear_session()
    training.keras.utils.set_random_seed(7)
    model = training.compiled(training.functional())
    return {"restored": fit(model, epochs=2), "resumed": fit(model, epochs=1)}


# Keras asks Orbax for arrays without saying where they shall lie.
@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_workers_and_one_device_resume_from_what_workers_saved(tmp_path):
    found = cluster.results("orbax_worker.py", tmp_path, workers=2, devices=2)
    want = one_device()
    for worker in found:
        assert len(worker) == 3
        for name, weights in worker.items():
            assert_same(name, weights, want)
    model = training.keras.models.load_model(tmp_path / "callback_False")
    assert_same("restored", model.get_weights(), want["restored"])
    assert_same("resumed", fit(model, epochs=1), want["resumed"])
