"""Every call, and every way to run a step."""

import keras
import numpy as np
import pytest
from keras import layers
from parity import (
    check,
    compiled,
    fit,
    fit_evaluate_predict,
    mlp,
    numbers,
    weights_of_rows,
)

import keras_mirror as km

# How the step runs ----------------------------------------------------------

MODES = {
    "eager": {"run_eagerly": True},
    "not_jitted": {"jit_compile": False},
    "auto_jitted": {"jit_compile": "auto"},
}


@pytest.mark.parametrize("name", MODES)
def test_mode_matches_one_device(name):
    drive = fit_evaluate_predict(*numbers(14), epochs=1, test_batch_size=8)
    check(mlp, compiled(metrics=["mae"], **MODES[name]), drive)


@pytest.mark.parametrize("name", ["eager", "not_jitted"])
def test_what_is_not_compiled_runs_on_one_device(name):
    """Over several, operations run ahead of a collective until CPU devices hang."""
    places = set()

    class Looking(keras.Sequential):
        def train_step(self, state, data):
            for value in (*data[:2], *state[0]):
                places.update(value.devices())
            return super().train_step(state, data)

    model = Looking(mlp().layers)
    model.compile("sgd", "mse", distribution=km.MirroredStrategy(), **MODES[name])
    model.fit(*numbers(6), batch_size=4, verbose=0)
    assert len(places) == 1 and len(model.weights[0].value.devices()) == 4


@pytest.mark.parametrize("rows", [26, 28], ids=["short_batch", "whole_batches"])
def test_steps_per_execution_with_a_short_last_group_matches_one_device(rows):
    """Seven batches of 4 by threes leave a group of one batch."""
    drive = fit_evaluate_predict(*numbers(rows), batch_size=4, test_batch_size=4)
    check(mlp, compiled(metrics=["mae"], steps_per_execution=3), drive)


# The calls on one batch -----------------------------------------------------


@pytest.mark.parametrize("rows", [8, 6, 3, 1])
def test_calls_on_one_batch_match_one_device(rows):
    x, y = numbers(rows)

    def drive(model):
        trained = [model.train_on_batch(x, y, return_dict=True) for _ in range(2)]
        return {
            "trained": trained,
            "as_list": model.train_on_batch(x, y),
            "tested": model.test_on_batch(x, y, return_dict=True),
            "predicted": model.predict_on_batch(x),
        }

    check(mlp, compiled(metrics=["mae"]), drive)


def test_weighted_calls_on_one_batch_match_one_device():
    x, y = numbers(8)
    labels = (y[:, 0] > 0).astype("int32")
    weight = weights_of_rows(8)

    def drive(model):
        return [
            model.train_on_batch(x, labels, sample_weight=weight, return_dict=True),
            model.train_on_batch(x, labels, class_weight={0: 0.3, 1: 2.0}),
            model.test_on_batch(x, labels, sample_weight=weight, return_dict=True),
        ]

    loss = "sparse_categorical_crossentropy"
    build = lambda: mlp(outputs=2, activation="softmax")  # noqa: E731
    check(build, compiled(loss, weighted_metrics=["accuracy"]), drive)


def test_predict_gives_the_rows_in_order():
    """The output is the input: any dropped, doubled or swapped row shows."""
    x = np.arange(11 * 3, dtype="float32").reshape(11, 3)
    build = lambda: keras.Sequential([keras.Input((3,)), layers.Dense(3)])  # noqa: E731

    def drive(model):
        fit(x / 33, x / 33, batch_size=4)(model)
        model.layers[0].set_weights([np.eye(3), np.zeros(3)])
        sizes = (1, 2, 3, 4, 5, 11, 64)
        return [model.predict(x, batch_size=size, verbose=0) for size in sizes]

    _, got = check(build, compiled(), drive)
    for predicted in got.result:
        np.testing.assert_allclose(predicted, x, rtol=1e-5)


def test_predict_of_an_untrained_model_matches_one_device():
    x, y = numbers(10)

    def drive(model):
        before = model.predict(x, batch_size=4, verbose=0)
        return {"before": before, "trained": fit(x, y)(model)}

    check(mlp, compiled(), drive)
