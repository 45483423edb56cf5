"""`model(x)` outside of fit: as before, whatever devices anything lies on."""

import jax
import keras
import numpy as np
import pytest
from parity import assert_same, mirrored

rng = np.random.default_rng(0)
X = rng.normal(size=(8, 5)).astype("float32")


def trained(strategy, units=5):
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(units)])
    model.compile("sgd", "mse", distribution=strategy)
    model.fit(X, np.zeros((8, units), "float32"), batch_size=4, verbose=0)
    return model


@pytest.mark.parametrize("device", [0, 2])
def test_inputs_may_lie_on_one_device(device):
    model = trained(mirrored())
    want = model.predict(X, verbose=0)
    got = model(jax.device_put(X, jax.devices()[device]))
    assert_same("outputs", np.asarray(got), want)


def test_models_under_different_strategies_can_be_chained():
    one, two = trained(mirrored()), trained(mirrored(2), units=3)
    want = two.predict(one.predict(X, verbose=0), verbose=0)
    assert_same("outputs", np.asarray(two(one(X))), want)


def test_a_model_may_contain_one_of_another_strategy():
    inner = trained(mirrored())
    outer = keras.Sequential([keras.Input((5,)), inner, keras.layers.Dense(3)])
    outer.compile("sgd", "mse", distribution=mirrored(2))
    outer.fit(X, np.zeros((8, 3), "float32"), batch_size=4, verbose=0)
    inner.fit(X, X, batch_size=4, verbose=0)
    got = np.asarray(outer(X))
    assert_same("outputs", got, outer.predict(X, verbose=0))


def test_compiling_again_moves_the_weights_at_once():
    model = trained(mirrored())
    slots = model.optimizer
    for strategy, count in ((mirrored(2), 2), (None, 1), ("one_device", 1)):
        model.compile(slots, "mse", distribution=strategy)
        for variable in model.variables + slots.variables:
            assert len(variable.value.sharding.device_set) == count
    model(jax.device_put(X, jax.devices()[2]))
