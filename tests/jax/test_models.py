"""Feed-forward, convolutional, attention and multi-branch models."""

import keras
import numpy as np
import pytest
from keras import layers
from parity import (
    ROWS,
    check,
    compiled,
    fit_evaluate_predict,
    mlp,
    numbers,
    weights_of_rows,
)


def images(rows=ROWS, classes=3, seed=5):
    rng = np.random.default_rng(seed)
    y = np.arange(rows) // 3 % classes
    x = rng.normal(size=(rows, 6, 6, 2)) + y[:, None, None, None]
    return x.astype("float32"), y.astype("int32")


def series(rows=ROWS, steps=5, seed=6):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, steps, 3)).cumsum(axis=1).astype("float32")
    return x, x[:, :, :1] * np.linspace(-1, 1, rows, dtype="float32")[:, None, None]


def tokens(rows=ROWS, seed=8):
    rng = np.random.default_rng(seed)
    x = rng.integers(1, 20, size=(rows, 6)).astype("int32")
    for row in range(rows):
        x[row, 1 + row % 8 // 2 :] = 0  # row 0 has one valid token, row 7 four
    return x, (np.arange(rows) % 3).astype("int32")


def sequential(shape, *stack, dtype="float32"):
    return keras.Sequential([keras.Input(shape, dtype=dtype), *stack])


def convolution():
    return sequential(
        (6, 6, 2),
        layers.Conv2D(4, 3, activation="tanh"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(3),
    )


def separable_convolutions():
    return sequential(
        (6, 6, 2),
        layers.SeparableConv2D(4, 3, activation="tanh"),
        layers.DepthwiseConv2D(2, activation="tanh"),
        layers.AveragePooling2D(2),
        layers.GlobalAveragePooling2D(),
        layers.Dense(3),
    )


def group_normalized():
    return sequential(
        (6, 6, 2),
        layers.Conv2D(4, 3),
        layers.GroupNormalization(groups=2),
        layers.GlobalMaxPooling2D(),
        layers.Dense(3),
    )


def normalized_rows():
    return sequential(
        (6,),
        layers.Dense(8),
        layers.LayerNormalization(),
        layers.UnitNormalization(),
        layers.RMSNormalization(),
        layers.Dense(1),
    )


def spectral_normalized():
    return sequential(
        (6,),
        layers.SpectralNormalization(layers.Dense(8, activation="tanh")),
        layers.Dense(1),
    )


def time_distributed():
    inputs = keras.Input((5, 3))
    hidden = layers.TimeDistributed(layers.Dense(4, activation="tanh"))(inputs)
    return keras.Model(inputs, layers.TimeDistributed(layers.Dense(1))(hidden))


def transformer():
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 8, mask_zero=True)(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    x = layers.LayerNormalization()(x + layers.Dense(8, activation="gelu")(x))
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


def shared_layers():
    shared = layers.Dense(5, activation="tanh")
    inputs = keras.Input((6,))
    twice = layers.Concatenate()([shared(inputs), shared(inputs * -0.5 + 1.0)])
    return keras.Model(inputs, layers.Dense(1)(twice))


def frozen_layers():
    frozen = layers.Dense(8, activation="tanh", trainable=False)
    statistics = layers.BatchNormalization(trainable=False)
    return sequential((6,), frozen, statistics, layers.Dense(1))


class WithUnusedWeights(keras.Model):
    """Subclassed and unbuilt; one of its layers never meets the loss."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(8, activation="tanh")
        self.unused = layers.Dense(3)
        self.head = layers.Dense(1)

    def call(self, inputs):
        hidden = self.hidden(inputs)
        self.unused(hidden)
        return self.head(hidden)


SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
MODELS = {
    "dense": (mlp, numbers, "mse"),
    "convolution": (convolution, images, SPARSE),
    "separable_convolutions": (separable_convolutions, images, SPARSE),
    "group_normalized": (group_normalized, images, SPARSE),
    "normalized_rows": (normalized_rows, numbers, "mse"),
    "spectral_normalized": (spectral_normalized, numbers, "mse"),
    "time_distributed": (time_distributed, series, "mse"),
    "transformer": (transformer, tokens, SPARSE),
    "shared_layers": (shared_layers, numbers, "mse"),
    "frozen_layers": (frozen_layers, numbers, "mse"),
    "subclassed_unbuilt": (WithUnusedWeights, numbers, "mse"),
}


@pytest.mark.parametrize("name", MODELS)
def test_model_matches_one_device(name):
    build, data, loss = MODELS[name]
    check(build, compiled(loss), fit_evaluate_predict(*data()))


def test_unused_weights_stay_as_initialised():
    x, y = numbers()

    def built():
        model = WithUnusedWeights()
        model(x[:1])
        return model

    _, got = check(built, compiled(), fit_evaluate_predict(x, y))
    at = [v.path for v in got.model.weights].index(got.model.unused.kernel.path)
    np.testing.assert_array_equal(got.model.get_weights()[at], got.start[at])


# Several inputs and outputs -------------------------------------------------


def two_branches():
    left, right = keras.Input((6,), name="left"), keras.Input((3,), name="right")
    both = layers.Concatenate()([layers.Dense(5, activation="tanh")(left), right])
    outputs = {
        "size": layers.Dense(1, name="size")(both),
        "kind": layers.Dense(3, activation="softmax", name="kind")(both),
    }
    return keras.Model({"left": left, "right": right}, outputs)


def two_branch_data():
    left, size = numbers()
    right, _ = numbers(inputs=3, seed=4)
    kind = (np.arange(ROWS) // 2 % 3).astype("int32")
    return {"left": left, "right": right}, {"size": size, "kind": kind}


def two_branch_compile():
    return {
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
        "loss": {"size": "mae", "kind": "sparse_categorical_crossentropy"},
        "loss_weights": {"size": 2.0, "kind": 0.3},
        "metrics": {"size": ["mse"], "kind": ["accuracy"]},
        "weighted_metrics": {"size": ["mae"], "kind": ["accuracy"]},
    }


def test_dicts_with_loss_weights_match_one_device():
    x, y = two_branch_data()
    want, _ = check(two_branches, two_branch_compile, fit_evaluate_predict(x, y))
    assert {"size_loss", "kind_loss"} <= set(want.result["history"])


def test_sample_weights_of_each_output_match_one_device():
    x, y = two_branch_data()
    sample_weight = {"size": weights_of_rows(), "kind": weights_of_rows()[::-1].copy()}
    drive = fit_evaluate_predict(x, y, sample_weight=sample_weight)
    check(two_branches, two_branch_compile, drive)


def test_each_output_with_its_own_denominator_matches_one_device():
    x, y = two_branch_data()
    sample_weight = {"size": weights_of_rows(), "kind": weights_of_rows()[::-1].copy()}

    def compile_args():
        return two_branch_compile() | {
            "loss": {
                "size": keras.losses.MeanAbsoluteError("mean_with_sample_weight"),
                "kind": keras.losses.SparseCategoricalCrossentropy(reduction="sum"),
            },
            "loss_weights": {"size": 1.0, "kind": 0.05},
        }

    drive = fit_evaluate_predict(x, y, sample_weight=sample_weight)
    check(two_branches, compile_args, drive)


def test_output_without_a_loss_matches_one_device():
    x, y = two_branch_data()

    def compile_args():
        loss = {"size": "mse", "kind": None}
        return {"optimizer": keras.optimizers.SGD(0.1), "loss": loss}

    check(two_branches, compile_args, fit_evaluate_predict(x, {"size": y["size"]}))
