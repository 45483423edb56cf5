"""Orbax under two workers: one path for all, and the weights of one device."""

import cluster
import keras
import pytest
import training
from parity import assert_same


def fit(model, epochs, **options):
    x, y = training.X[:24], training.Y[:24]
    options = {"batch_size": 8, "shuffle": False, "verbose": 0} | options
    model.fit(x, y, epochs=epochs, **options)
    return model.get_weights()


def one_device(saving):
    """The weights that are saved, and those an epoch later."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    model = training.compiled(training.functional())
    restored = fit(model, epochs=2, callbacks=[saving])
    return {"restored": restored, "resumed": fit(model, epochs=1)}


# Keras asks Orbax for arrays without saying where they shall lie.
@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_workers_and_one_device_resume_from_what_workers_saved(tmp_path):
    want = one_device(keras.callbacks.OrbaxCheckpoint(str(tmp_path / "one_device")))
    found = cluster.results("orbax_worker.py", tmp_path, workers=2, devices=2)
    for worker in found:
        assert len(worker) == 4
        for name, weights in worker.items():
            assert_same(name, weights, {when: want[when] for when in weights})
    model = keras.models.load_model(tmp_path / "callback_False")
    assert_same("restored", model.get_weights(), want["restored"])
    assert_same("resumed", fit(model, epochs=1), want["resumed"])
