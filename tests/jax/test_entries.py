"""Every way in: argument, scope, global switch, environment."""

import json
import os
import subprocess
import sys

import jax
import keras
import numpy as np
import pytest
from parity import (
    assert_same,
    assert_trains_like,
    compile_with,
    compiled,
    device_count,
    fit,
    fit_evaluate_predict,
    fresh,
    mirrored,
    mlp,
    numbers,
    run_on_one_device,
)

import keras_mirror as km

x, y = numbers()


# Each way in ----------------------------------------------------------------


@pytest.mark.parametrize("form", ["name", "object", "two_devices"])
def test_compile_argument(form, one_device):
    distribution, devices = {
        "name": lambda: ("mirrored", 4),
        "object": lambda: (km.MirroredStrategy(), 4),
        "two_devices": lambda: (km.MirroredStrategy(devices=["cpu:0", "cpu:2"]), 2),
    }[form]()
    model = compile_with(fresh(), distribution=distribution)
    assert_trains_like(one_device, model, devices)


def test_scope(one_device):
    with mirrored().scope():
        model = compile_with(fresh())
    assert_trains_like(one_device, model, 4)


@pytest.mark.parametrize("form", ["name", "object"])
def test_global_switch(form, one_device):
    strategy = "mirrored" if form == "name" else km.MirroredStrategy()
    km.set_strategy(strategy)
    if form == "object":
        assert km.get_strategy() is strategy
    assert_trains_like(one_device, compile_with(fresh()), 4)
    km.set_strategy(None)
    assert km.get_strategy() is None
    assert_trains_like(one_device, compile_with(fresh()), 1)


PROGRAM = """
import json, sys
sys.path[:0] = sys.argv[1:]
import keras_mirror as km
import parity
from parity import compiled, device_count, fit, numbers, run_on_one_device

run = run_on_one_device(parity.mlp, compiled(), fit(*numbers()))
weights = [weight.tolist() for weight in run.model.get_weights()]
print(json.dumps([device_count(run.model), weights]))
"""


@pytest.mark.parametrize(
    ("setting", "devices"), [("mirrored", 4), ("one_device", 1), ("", 1)]
)
def test_environment(setting, devices, one_device):
    here = os.path.dirname(os.path.abspath(__file__))
    root = os.path.dirname(os.path.dirname(here))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, here, root],
        capture_output=True,
        text=True,
        timeout=180,
        env=os.environ | {"KERAS_MIRROR_STRATEGY": setting},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found, weights = json.loads(done.stdout.splitlines()[-1])
    weights = [np.array(weight) for weight in weights]
    assert found == devices
    assert_same("weights", weights, one_device.model.get_weights())


def test_keras_own_data_parallel():
    """The step then runs as Keras runs it: the devices must divide each batch."""
    train = fit_evaluate_predict(x[:24], y[:24])
    want = run_on_one_device(mlp, compiled(), train)
    distribution = keras.distribution.DataParallel(auto_shard_dataset=False)
    model = compile_with(fresh(), distribution=distribution)
    result = train(model)
    assert device_count(model) == 4
    assert_same("weights", model.get_weights(), want.model.get_weights())
    assert_same("result", result, want.result)
    assert keras.distribution.distribution() is None, "it leaked out of the model"


# Precedence: argument, innermost scope, switch, environment -----------------


def test_argument_beats_scope_beats_switch(monkeypatch):
    monkeypatch.setenv("KERAS_MIRROR_STRATEGY", "mirrored")
    train = fit(x[:8], y[:8], epochs=1)
    two, three = mirrored(2), mirrored(3)

    def devices(**distribution):
        model = compile_with(fresh(), **distribution)
        train(model)
        return device_count(model)

    assert devices() == 4
    km.set_strategy(three)
    assert devices() == 3
    with mirrored().scope():
        assert devices() == 4
        with two.scope():
            assert devices() == 2
            assert devices(distribution="one_device") == 1
            assert devices(distribution=three) == 3
        assert devices() == 4
    assert devices() == 3
    km.set_strategy(None)


def test_one_device_forces_one_device_under_every_switch(one_device):
    km.set_strategy("mirrored")
    with mirrored().scope():
        model = compile_with(fresh(), distribution="one_device")
    assert_trains_like(one_device, model, 1)
    model = compile_with(fresh(), distribution=km.OneDeviceStrategy())
    assert_trains_like(one_device, model, 1)


def test_one_device_strategy_uses_the_device_it_is_given(one_device):
    strategy = km.OneDeviceStrategy(device="cpu:2")
    model = compile_with(fresh(), distribution=strategy)
    assert_trains_like(one_device, model, 1)
    (device,) = model.trainable_variables[0].value.devices()
    assert device.id == 2


def test_clear_session_does_not_undo_the_switch(one_device):
    strategy = km.MirroredStrategy()
    km.set_strategy(strategy)
    keras.utils.clear_session()
    assert km.get_strategy() is strategy
    assert_trains_like(one_device, compile_with(fresh()), 4)


def test_switch_in_one_thread_holds_in_another():
    import threading

    found = []
    km.set_strategy("mirrored")

    def look():
        model = compile_with(mlp())
        fit(x, y, epochs=1)(model)
        found.append(device_count(model))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [4]


def test_bound_model_stays_bound_when_the_switch_changes(one_device):
    """A model is bound at compile, not at fit."""
    model = compile_with(fresh(), distribution="mirrored")
    km.set_strategy("one_device")
    assert_trains_like(one_device, model, 4)


def test_a_mesh_that_the_user_has_set_does_not_matter(one_device):
    with jax.set_mesh(jax.make_mesh((4,), ("data",))):
        model = compile_with(fresh(), distribution="mirrored")
        assert_trains_like(one_device, model, 4)
        assert model(x[:3]).shape == model.predict(x[:3], verbose=0).shape
