"""Layers whose outcome depends on more than their own row.

Each of these is an ordinary user's layer: rows that see each other, state that
follows the batch, losses that come from a layer, positions within the batch.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops, regularizers
from parity import check, compiled, fit_evaluate_predict, numbers


class Centred(layers.Layer):
    """Subtracts the mean of the batch: every row depends on every other."""

    def call(self, inputs):
        return inputs - ops.mean(inputs, axis=0)


class SoftmaxOverRows(layers.Layer):
    """Attention between the rows of a batch."""

    def call(self, inputs):
        return ops.softmax(inputs @ ops.transpose(inputs), axis=-1) @ inputs


class Positioned(layers.Layer):
    """Adds a term that depends on where in the batch a row stands."""

    def call(self, inputs):
        place = ops.cast(ops.arange(ops.shape(inputs)[0]), inputs.dtype)
        return inputs + 0.05 * place[:, None]


class ReversedRows(layers.Layer):
    """Mixes each row with the one at the other end of the batch."""

    def call(self, inputs):
        return inputs + 0.5 * ops.flip(inputs, axis=0)


class MovingMean(layers.Layer):
    """Keeps a moving average of its batch mean; `use` says which value it uses."""

    def __init__(self, use):
        super().__init__()
        self.use = use

    def build(self, shape):
        self.average = self.add_weight(
            shape=(shape[-1],), initializer="zeros", trainable=False, name="average"
        )

    def call(self, inputs, training=False):
        before = ops.convert_to_tensor(self.average)
        if training:
            self.average.assign(0.9 * before + 0.1 * ops.mean(inputs, axis=0))
        return inputs - (before if self.use == "old" else self.average)


class Seen(layers.Layer):
    """Counts rows, and keeps the largest value and the sum of what it saw."""

    def build(self, shape):
        def keep(name, dtype, value):
            return self.add_weight(
                shape=(), dtype=dtype, initializer=value, trainable=False, name=name
            )

        self.rows = keep("rows", "int32", "zeros")
        self.batches = keep("batches", "int32", "zeros")
        self.largest = keep("largest", "float32", "zeros")
        self.total = keep("total", "float32", "zeros")

    def call(self, inputs, training=False):
        if training:
            self.rows.assign(self.rows + ops.shape(inputs)[0])
            self.batches.assign(self.batches + 1)
            self.largest.assign(ops.maximum(self.largest, ops.max(inputs)))
            self.total.assign(self.total + ops.sum(inputs))
        return inputs


class Divergence(layers.Layer):
    """The KL term of a variational autoencoder, without its noise."""

    def __init__(self, reduce):
        super().__init__()
        self.reduce = reduce

    def call(self, inputs):
        mean, log_variance = ops.split(inputs, 2, axis=-1)
        terms = ops.exp(log_variance) + ops.square(mean) - 1.0 - log_variance
        per_row = 0.5 * ops.sum(terms, axis=-1)
        if self.reduce == "mean":
            self.add_loss(0.1 * ops.mean(per_row))
        elif self.reduce == "sum":
            self.add_loss(0.01 * ops.sum(per_row))
        else:
            self.add_loss(0.1 * ops.sqrt(ops.mean(ops.square(per_row))))
        return mean


class Sparse(regularizers.Regularizer):
    """An activity regularizer that is not a sum over rows."""

    def __call__(self, x):
        return 0.1 * ops.sqrt(ops.sum(ops.square(x)))


def around(*stack, **dense):
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="tanh", **dense),
            *stack,
            layers.Dense(1),
        ]
    )


LAYERS = {
    "rows_centred": lambda: around(Centred()),
    "rows_attend_to_each_other": lambda: around(SoftmaxOverRows()),
    "rows_flipped": lambda: around(ReversedRows()),
    "position_in_batch": lambda: around(Positioned()),
    "moving_mean_used_before_update": lambda: around(MovingMean("old")),
    "moving_mean_used_after_update": lambda: around(MovingMean("new")),
    "state_counts_maximum_and_sum": lambda: around(Seen()),
    "add_loss_mean": lambda: around(Divergence("mean")),
    "add_loss_sum": lambda: around(Divergence("sum")),
    "add_loss_root_of_mean": lambda: around(Divergence("root")),
    "activity_l2": lambda: around(activity_regularizer="l2"),
    "activity_norm": lambda: around(activity_regularizer=Sparse()),
    "activity_layer": lambda: around(layers.ActivityRegularization(0.01, 0.02)),
    "kernel_and_bias_regularizers": lambda: around(
        kernel_regularizer=regularizers.L1L2(0.01, 0.02), bias_regularizer="l2"
    ),
    "orthogonal_regularizer": lambda: around(
        kernel_regularizer=regularizers.OrthogonalRegularizer(0.05)
    ),
    "constraints": lambda: around(
        kernel_constraint=keras.constraints.MaxNorm(0.7),
        bias_constraint=keras.constraints.NonNeg(),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_matches_one_device(name):
    check(LAYERS[name], compiled(), fit_evaluate_predict(*numbers()))


def test_layer_counts_each_row_once():
    x, y = numbers()
    _, got = check(lambda: around(Seen()), compiled(), fit_evaluate_predict(x, y))
    seen = got.model.layers[1]
    assert int(seen.rows) == 2 * len(x)
    assert int(seen.batches) == 2 * 4


def test_adapted_preprocessing_layer_matches_one_device():
    x, y = numbers()

    def build():
        normalization = layers.Normalization()
        normalization.adapt(x)
        return keras.Sequential([keras.Input((6,)), normalization, layers.Dense(1)])

    check(build, compiled(), fit_evaluate_predict(x, y))


def test_model_with_only_added_losses_matches_one_device():
    x, _ = numbers()

    def build():
        inputs = keras.Input((6,))
        hidden = layers.Dense(8, activation="tanh")(inputs)
        return keras.Model(inputs, Divergence("mean")(hidden))

    def compile_args():
        return {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9)}

    want, _ = check(build, compile_args, fit_evaluate_predict(x))
    assert np.isfinite(want.result["history"]["loss"]).all()
