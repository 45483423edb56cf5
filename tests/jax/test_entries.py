"""Every way in: argument, scope, global switch, environment; and moving on."""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import layers
from parity import (
    assert_same,
    compiled,
    device_count,
    fit,
    fit_evaluate_predict,
    mirrored,
    mlp,
    numbers,
    run_on_one_device,
    sgd,
)

import keras_mirror as km

x, y = numbers()
TRAIN = fit_evaluate_predict(x, y)


@pytest.fixture(scope="module")
def one_device():
    return run_on_one_device(mlp, compiled(), TRAIN)


def fresh():
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    return mlp()


def compile_with(model, **distribution):
    model.compile(optimizer=sgd(), loss="mse", **distribution)
    return model


def assert_trains_like(one_device, model, devices):
    result = TRAIN(model)
    assert device_count(model) == devices
    assert_same("weights", model.get_weights(), one_device.model.get_weights())
    assert_same("result", result, one_device.result)


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


# Moving a model on ----------------------------------------------------------

ROUTES = {
    "4_to_2_to_none": [4, 2, None],
    "none_to_4_to_none": [None, 4, None],
    "one_to_4_to_one": [1, 4, 1],
    "2_to_4_to_3": [2, 4, 3],
}


@pytest.mark.parametrize("route", ROUTES)
def test_rebinding_keeps_weights_and_slots(route):
    """Adam's slots and step count go with the optimizer object."""

    def strategy(replicas):
        if replicas is None:
            return {}
        if replicas == 1:
            return {"distribution": "one_device"}
        return {"distribution": mirrored(replicas)}

    def follow(steps):
        model = fresh()
        optimizer = keras.optimizers.Adam(0.01)
        for replicas in steps:
            model.compile(optimizer=optimizer, loss="mse", **strategy(replicas))
            result = TRAIN(model)
            assert device_count(model) == (replicas or 1)
        slots = [np.asarray(v.value) for v in model.optimizer.variables]
        return {"weights": model.get_weights(), "slots": slots, "result": result}

    want = follow([None, None, None])
    got = follow(ROUTES[route])
    assert_same("end", got, want)
    assert int(got["slots"][0]) == 3 * 2 * 4


def test_model_trained_before_the_strategy_goes_on_as_on_one_device():
    def follow(**distribution):
        model = compile_with(fresh())
        TRAIN(model)
        compile_with(model, **distribution)
        return {"result": TRAIN(model), "weights": model.get_weights()}

    assert_same("end", follow(distribution="mirrored"), follow())


def test_compiling_again_with_another_loss_matches_one_device():
    def follow(**distribution):
        model = compile_with(fresh(), **distribution)
        first = TRAIN(model)
        model.compile(optimizer="sgd", loss="mae", metrics=["mse"], **distribution)
        return [first, TRAIN(model), model.get_weights()]

    assert_same("end", follow(distribution="mirrored"), follow())


# When the model is built ----------------------------------------------------


@pytest.mark.parametrize("moment", ["before", "inside", "outside"])
def test_moment_of_building_makes_no_difference(moment, one_device):
    if moment == "before":
        model = fresh()
        model.predict(x[:4], verbose=0)
    strategy = mirrored()
    with strategy.scope():
        if moment == "inside":
            model = fresh()
        elif moment == "before":
            compile_with(model)
    if moment == "inside":
        compile_with(model, distribution=strategy)
    elif moment == "outside":
        model = compile_with(fresh(), distribution=strategy)
    assert_trains_like(one_device, model, 4)


class Unbuilt(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(8, activation="tanh")
        self.head = layers.Dense(1)

    def call(self, inputs):
        return self.head(self.hidden(inputs))


@pytest.mark.parametrize("first", ["fit", "train_on_batch", "evaluate", "predict"])
def test_unbuilt_model_is_built_by_its_first_call(first):
    def follow(**distribution):
        keras.utils.set_random_seed(7)
        model = compile_with(Unbuilt(), **distribution)
        if first != "fit":
            arguments = (x[:8],) if first == "predict" else (x[:8], y[:8])
            getattr(model, first)(*arguments)
        result = TRAIN(model)
        return model, {"result": result, "weights": model.get_weights()}

    (plain, want), (model, got) = follow(), follow(distribution="mirrored")
    assert device_count(plain) == 1
    assert device_count(model) == 4
    assert_same("end", got, want)


@pytest.mark.parametrize("where", ["scope", "switch", "argument"])
def test_loaded_model_goes_on_as_on_one_device(where, tmp_path, one_device):
    path = tmp_path / "m.keras"
    compile_with(fresh()).save(path)
    if where == "scope":
        with mirrored().scope():
            model = keras.models.load_model(path)
    elif where == "switch":
        km.set_strategy("mirrored")
        model = keras.models.load_model(path)
    else:
        model = compile_with(keras.models.load_model(path), distribution="mirrored")
    assert_trains_like(one_device, model, 4)


@pytest.mark.parametrize("when", ["before_compile", "after_compile", "after_use"])
def test_weights_loaded_later_are_where_training_starts(when, tmp_path, one_device):
    path = tmp_path / "m.weights.h5"
    fresh().save_weights(path)
    keras.utils.set_random_seed(99)
    model = mlp()
    if when == "before_compile":
        model.load_weights(path)
    compile_with(model, distribution="mirrored")
    if when == "after_use":
        model.evaluate(x, y, verbose=0)
        model.predict(x, verbose=0)
    if when != "before_compile":
        model.load_weights(path)
    assert_trains_like(one_device, model, 4)


def test_set_weights_after_training_reaches_every_device(one_device):
    model = compile_with(fresh(), distribution="mirrored")
    start = model.get_weights()
    TRAIN(model)
    model.set_weights(start)
    compile_with(model, distribution="mirrored")
    assert_trains_like(one_device, model, 4)


def test_cloned_model_trains_on_its_own(one_device):
    model = compile_with(fresh(), distribution="mirrored")
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    assert_trains_like(one_device, compile_with(clone, distribution="mirrored"), 4)
    assert_same("original", model.get_weights(), one_device.start, 0)
