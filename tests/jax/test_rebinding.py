"""Models that move between strategies, and that are built or loaded at any time."""

import keras
import numpy as np
import pytest
from keras import layers
from parity import (
    assert_same,
    assert_trains_like,
    compile_with,
    device_count,
    fresh,
    mirrored,
    mlp,
    numbers,
    train_on_numbers,
)

import keras_mirror as km

x, y = numbers()


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
            result = train_on_numbers(model)
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
        train_on_numbers(model)
        compile_with(model, **distribution)
        return {"result": train_on_numbers(model), "weights": model.get_weights()}

    assert_same("end", follow(distribution="mirrored"), follow())


def test_compiling_again_with_another_loss_matches_one_device():
    def follow(**distribution):
        model = compile_with(fresh(), **distribution)
        first = train_on_numbers(model)
        model.compile(optimizer="sgd", loss="mae", metrics=["mse"], **distribution)
        return [first, train_on_numbers(model), model.get_weights()]

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
        result = train_on_numbers(model)
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
    train_on_numbers(model)
    model.set_weights(start)
    compile_with(model, distribution="mirrored")
    assert_trains_like(one_device, model, 4)


def test_cloned_model_trains_on_its_own(one_device):
    model = compile_with(fresh(), distribution="mirrored")
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    assert_trains_like(one_device, compile_with(clone, distribution="mirrored"), 4)
    assert_same("original", model.get_weights(), one_device.start, 0)
