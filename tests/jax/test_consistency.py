"""A copy that differs is found and named."""

import jax
import keras
import numpy as np
import pytest
from parity import compiled, mirrored, mlp, numbers

import keras_mirror as km

x, y = numbers()


def trained():
    model = mlp()
    model.compile(**compiled(metrics=["mae", "r2_score"])(), distribution=mirrored())
    model.fit(x, y, batch_size=8, verbose=0)  # three even batches and a tail
    model.fit(x[:24], y[:24], batch_size=8, verbose=0)  # even ones alone
    return model


def drift(variable, replica):
    """Changes the copy of one replica."""
    value = variable.value
    copies = [np.asarray(shard.data).copy() for shard in value.addressable_shards]
    copies[replica].flat[0] += 1e-6
    placed = [
        jax.device_put(copy, shard.device)
        for copy, shard in zip(copies, value.addressable_shards, strict=True)
    ]
    variable._value = jax.make_array_from_single_device_arrays(
        value.shape, value.sharding, placed
    )


def test_equal_copies_pass():
    km.check_consistency(trained())


@pytest.mark.parametrize("replica", [1, 3])
def test_the_first_variable_that_differs_is_named(replica):
    model = trained()
    drift(model.layers[1].kernel, replica)
    drift(model.optimizer.variables[-1], 2)
    with pytest.raises(
        km.errors.InconsistentVariableError,
        match=rf"{model.layers[1].kernel.path}' differs on replica {replica} from",
    ):
        km.check_consistency(model)


def test_the_callback_checks_every_few_steps(monkeypatch):
    checked = []
    monkeypatch.setattr(
        "keras_mirror.callbacks.consistency.check_consistency", checked.append
    )
    model = mlp()
    model.compile(**compiled()(), distribution=mirrored())
    check = km.ConsistencyCheck(every_steps=3)
    model.fit(x, y, batch_size=4, epochs=2, callbacks=[check], verbose=0)
    assert len(checked) == 14 // 3


@pytest.mark.parametrize("every_steps", [0, -1, 1.5, True, None])
def test_a_wrong_number_of_steps_is_refused(every_steps):
    with pytest.raises(km.errors.OptionValueError, match="every_steps"):
        km.ConsistencyCheck(every_steps=every_steps)


def test_it_does_not_mind_models_without_a_strategy():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    km.check_consistency(model)
