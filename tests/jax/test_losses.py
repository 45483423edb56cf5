"""Every Keras loss, every reduction, weights, masks and users' own losses."""

import inspect

import keras
import numpy as np
import pytest
from keras import layers, losses, ops
from parity import ROWS, check, fit, numbers, sgd, weights_of_rows

CLASSES = 3


def labels(rows=ROWS):
    """Unevenly spread, so that no two replicas hold the same mixture."""
    return (np.arange(rows) ** 2 // 5 % CLASSES).astype("int32")


def sparse():
    return numbers()[0], labels()


def one_hot():
    return numbers()[0], np.eye(CLASSES, dtype="float32")[labels()]


def binary():
    return numbers()[0], (labels()[:, None] > 0).astype("float32")


def signed():
    return numbers()[0], (2.0 * (labels()[:, None] > 0) - 1.0).astype("float32")


def positive():
    return numbers()[0], 0.5 + np.abs(numbers(outputs=CLASSES)[1])


def pixels():
    y = numbers(outputs=8, seed=9)[1].reshape(ROWS, 2, 2, 2) > 0
    return numbers()[0], y.astype("float32")


def transcripts():
    """CTC labels of 1 to 3 characters; 0 fills the rest."""
    y = np.zeros((ROWS, 3), "int32")
    for row in range(ROWS):
        y[row, : 1 + row % 3] = 1 + (np.arange(1 + row % 3) + row) % 4
    return numbers()[0], y


def unit_norm(x):
    return x / ops.sqrt(1e-6 + ops.sum(ops.square(x), axis=-1, keepdims=True))


def network(units, activation=None, shape=None):
    stack = [layers.Dense(8, activation="tanh"), layers.Dense(units)]
    if shape is not None:
        stack.append(layers.Reshape(shape))
    if activation is not None:
        stack.append(layers.Activation(activation))
    return keras.Sequential([keras.Input((6,)), *stack])


# class: (data, arguments of `network`, learning rate)
LOSSES = {
    "BinaryCrossentropy": (binary, (1, "sigmoid"), 0.1),
    "BinaryFocalCrossentropy": (binary, (1, "sigmoid"), 0.1),
    "CTC": (transcripts, (30, None, (6, 5)), 0.01),
    "CategoricalCrossentropy": (one_hot, (CLASSES, "softmax"), 0.1),
    "CategoricalFocalCrossentropy": (one_hot, (CLASSES, "softmax"), 0.1),
    "CategoricalGeneralizedCrossEntropy": (sparse, (CLASSES, "softmax"), 0.1),
    "CategoricalHinge": (one_hot, (CLASSES, "softmax"), 0.1),
    "Circle": (sparse, (CLASSES, unit_norm), 0.001),
    "CosineSimilarity": (positive, (CLASSES,), 0.1),
    "Dice": (pixels, (8, "sigmoid", (2, 2, 2)), 0.1),
    "Hinge": (signed, (1, "tanh"), 0.1),
    "Huber": (numbers, (1,), 0.1),
    "KLDivergence": (one_hot, (CLASSES, "softmax"), 0.1),
    "LogCosh": (numbers, (1,), 0.1),
    "MeanAbsoluteError": (numbers, (1,), 0.1),
    "MeanAbsolutePercentageError": (positive, (CLASSES, "softplus"), 0.001),
    "MeanSquaredError": (numbers, (1,), 0.1),
    "MeanSquaredLogarithmicError": (positive, (CLASSES, "softplus"), 0.1),
    "Poisson": (positive, (CLASSES, "softplus"), 0.1),
    "SparseCategoricalCrossentropy": (sparse, (CLASSES, "softmax"), 0.1),
    "SquaredHinge": (signed, (1, "tanh"), 0.1),
    "Tversky": (pixels, (8, "sigmoid", (2, 2, 2)), 0.1),
}
# Their value is one number for the whole batch, or couples all pairs of rows:
# sample weights have no row to go to.
WITHOUT_ROWS = {"Dice", "Tversky"}


# Three whole batches of 8; the reductions, which a tail could upset, have 26 rows.
WHOLE = 24


def check_loss(
    make_loss, data, network_arguments=(1,), rate=0.1, rows=WHOLE, **fit_arguments
):
    def compile_args():
        return {"optimizer": sgd(rate), "loss": make_loss()}

    drive = fit(*(part[:rows] for part in data()), **fit_arguments)
    check(lambda: network(*network_arguments), compile_args, drive)


def test_table_names_every_keras_loss():
    found = {
        name
        for name, value in vars(losses).items()
        if inspect.isclass(value) and issubclass(value, losses.Loss)
    }
    assert found - {"Loss"} == set(LOSSES)


@pytest.mark.parametrize("name", LOSSES)
def test_loss_matches_one_device(name):
    data, shape, rate = LOSSES[name]
    weights = None if name in WITHOUT_ROWS else weights_of_rows(WHOLE)
    check_loss(getattr(losses, name), data, shape, rate, sample_weight=weights)


@pytest.mark.parametrize("name", ["Dice", "Tversky"])
def test_loss_of_each_image_matches_one_device(name):
    data, shape, rate = LOSSES[name]
    make_loss = lambda: getattr(losses, name)(axis=(1, 2, 3))  # noqa: E731
    check_loss(make_loss, data, shape, rate)


# Reductions -----------------------------------------------------------------

REDUCTIONS = ["sum", "sum_over_batch_size", "mean", "mean_with_sample_weight"]


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reduction_matches_one_device(reduction, weighted):
    check_loss(
        lambda: losses.MeanSquaredError(reduction=reduction),
        numbers,
        rate=0.002 if reduction == "sum" else 0.1,
        rows=ROWS,
        sample_weight=weights_of_rows() if weighted else None,
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_replica_without_weight_matches_one_device(reduction):
    """All rows of three replicas weigh nothing; a local mean would be 0 / 0."""
    weights = np.where(np.arange(ROWS) % 8 < 2, weights_of_rows(), 0.0)
    check_loss(
        lambda: losses.MeanSquaredError(reduction=reduction),
        numbers,
        rate=0.002 if reduction == "sum" else 0.1,
        rows=ROWS,
        sample_weight=weights.astype("float32"),
    )


@pytest.mark.parametrize("reduction", ["sum", "mean_with_sample_weight"])
def test_class_weight_matches_one_device(reduction):
    check_loss(
        lambda: losses.SparseCategoricalCrossentropy(reduction=reduction),
        sparse,
        (CLASSES, "softmax"),
        rate=0.01 if reduction == "sum" else 0.1,
        rows=ROWS,
        class_weight={0: 0.2, 1: 1.0, 2: 5.0},
    )


# What users write -----------------------------------------------------------


def per_row(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred) ** 3, axis=-1)


def scalar_mean(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred) ** 3)


def scalar_sum(y_true, y_pred):
    return 0.05 * ops.sum(ops.square(y_true - y_pred))


def root_of_mean(y_true, y_pred):
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


def contrastive(y_true, y_pred):
    """SimCLR: each row has to find its partner among all rows of the batch."""
    left, right = ops.split(unit_norm(y_pred), 2, axis=-1)
    logits = ops.matmul(left, ops.transpose(right)) / 0.5
    partner = ops.arange(ops.shape(logits)[0])
    return ops.sparse_categorical_crossentropy(partner, logits, from_logits=True)


def correlation(y_true, y_pred):
    y_true, y_pred = y_true - ops.mean(y_true), y_pred - ops.mean(y_pred)
    scale = ops.sqrt(ops.sum(y_true**2) * ops.sum(y_pred**2) + 1e-3)
    return 1.0 - ops.sum(y_true * y_pred) / scale


def worst_row(y_true, y_pred):
    return ops.max(ops.square(y_true - y_pred))


def ranked_pairs(y_true, y_pred):
    """A margin between each pair of rows, as (rows, rows)."""
    order = ops.sign(y_true - ops.transpose(y_true))
    return ops.relu(0.1 - order * (y_pred - ops.transpose(y_pred)))


class Shifted(losses.Loss):
    """Subtracts the batch's mean target, with rows of weights."""

    def call(self, y_true, y_pred):
        return ops.square(y_true - ops.mean(y_true) - y_pred)[:, 0]


OWN = [per_row, scalar_mean, scalar_sum, root_of_mean, correlation, worst_row]


@pytest.mark.parametrize("loss", [*OWN, ranked_pairs], ids=lambda loss: loss.__name__)
def test_own_loss_function_matches_one_device(loss):
    check_loss(lambda: loss, numbers)


def test_contrastive_loss_matches_one_device():
    check_loss(lambda: contrastive, numbers, (8,))


def test_own_loss_class_with_weights_matches_one_device():
    check_loss(Shifted, numbers, sample_weight=weights_of_rows(WHOLE))
