"""Gradients are reduced in the order of axes in which their products leave them."""

import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from parity import mirrored

from keras_mirror._engine import load
from keras_mirror._jax import layouts

RNG = np.random.default_rng(0)
PRODUCTS = {
    "rows": ((6, 3), (3, 4), "bd,df->bf", None),
    "rows and positions": ((6, 5, 3), (3, 4), "btd,df->btf", (1, 0)),
    "heads": ((6, 5, 3), (3, 2, 4), "btd,dhk->bthk", (2, 0, 1)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_order_is_the_products(name):
    rows, kernel, product, order = PRODUCTS[name]
    x, weights = (RNG.normal(size=shape).astype("float32") for shape in (rows, kernel))

    def loss(parameters, x, bias):
        y = jnp.einsum(product, x, parameters[0]) + parameters[1] + bias
        return jnp.sum(y**2), {"y": y, "none": None}

    arguments = ([weights, jnp.float32(2)], x, jnp.float32(1))
    grads, aux, orders = layouts.gradients(loss, *arguments)
    wanted, wanted_aux = jax.grad(loss, has_aux=True)(*arguments)
    assert orders == [order, None]
    np.testing.assert_allclose(aux["y"], wanted_aux["y"], rtol=1e-5)
    for grad, other in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(grad, other, rtol=1e-5)


def test_before_and_after_undo_each_other():
    value = jnp.arange(24).reshape(2, 3, 4)
    order = (2, 0, 1)
    product = layouts.before(value, order)
    assert product.shape == (3, 4, 2)
    np.testing.assert_array_equal(layouts.after(product, order), value)
    assert layouts.before(value, None) is value
    assert layouts.after(value, None) is value


@pytest.mark.parametrize(
    ("rows", "reduced"), [((8, 5, 3), "4,3"), ((8, 3), "3,4")], ids=["steps", "rows"]
)
def test_a_step_reduces_what_the_product_left(rows, reduced):
    model = keras.Sequential([keras.Input(rows[1:]), keras.layers.Dense(4)])
    model.compile("sgd", "mse", distribution=mirrored())
    program = load().step_report(model, jnp.ones(rows), jnp.ones((*rows[:-1], 4)))
    (collective,) = re.findall(r"= \((.*)\) all-reduce\(", program.text)
    assert f"f32[{reduced}]" in collective
