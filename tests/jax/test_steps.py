"""Every call and way to run a step, and what users override in a model."""

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops
from parity import (
    ROWS,
    check,
    compiled,
    fit,
    fit_evaluate_predict,
    mlp,
    numbers,
    weights_of_rows,
)

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


# What users override --------------------------------------------------------


class Base(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(8, activation="tanh")
        self.head = layers.Dense(1)

    def build(self, shape):
        self.hidden.build(shape)
        self.head.build((None, 8))
        self.built = True

    def call(self, inputs, training=False):
        return self.head(self.hidden(inputs))


def built(model_class):
    model = model_class()
    model.build((None, 6))
    return model


class OwnSteps(Base):
    """The steps of Keras' guide "Customizing what happens in fit with JAX"."""

    def __init__(self):
        super().__init__()
        self.total = keras.metrics.Mean(name="total")
        self.mae = keras.metrics.MeanAbsoluteError(name="mae")

    @property
    def metrics(self):
        return [self.total, self.mae]

    def loss_and_updates(self, trainable, other, x, y, training=False):
        y_pred, other = self.stateless_call(trainable, other, x, training=training)
        penalty = 0.1 * ops.mean(ops.square(y_pred))
        return ops.mean(ops.square(y - y_pred)) + penalty, (y_pred, other)

    def updated(self, metric_values, loss, y, y_pred):
        count = len(self.total.variables)
        total = self.total.stateless_update_state(metric_values[:count], loss)
        mae = self.mae.stateless_update_state(metric_values[count:], y, y_pred)
        logs = {
            "total": self.total.stateless_result(total),
            "mae": self.mae.stateless_result(mae),
        }
        return logs, [*total, *mae]

    def train_step(self, state, data):
        trainable, other, slots, metric_values = state
        x, y = data[:2]
        step = jax.value_and_grad(self.loss_and_updates, has_aux=True)
        (loss, (y_pred, other)), gradients = step(trainable, other, x, y, training=True)
        gradients = [0.5 * gradient for gradient in gradients]
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        logs, metric_values = self.updated(metric_values, loss, y, y_pred)
        return logs, (trainable, other, slots, metric_values)

    def test_step(self, state, data):
        trainable, other, metric_values = state
        x, y = data[:2]
        loss, (y_pred, other) = self.loss_and_updates(trainable, other, x, y)
        logs, metric_values = self.updated(metric_values, loss, y, y_pred)
        return logs, (trainable, other, metric_values)


class LogsWithoutMetrics(OwnSteps):
    """Logs plain numbers of the batch, and keeps no metric at all."""

    @property
    def metrics(self):
        return []

    def updated(self, metric_values, loss, y, y_pred):
        return {"loss": loss, "worst": ops.max(ops.abs(y - y_pred))}, metric_values


class ClippedByRows(OwnSteps):
    """Scales its gradients by a value of the whole batch, before applying them."""

    def train_step(self, state, data):
        x, y = data[:2]
        return super().train_step(state, (x - ops.mean(x, axis=0), y / ops.std(y)))


class OwnLoss(Base):
    """A compute_loss that couples the rows and keeps its own metric."""

    def __init__(self):
        super().__init__()
        self.spread = keras.metrics.Mean(name="spread")

    @property
    def metrics(self):
        return [*super().metrics, self.spread]

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        self.spread.update_state(ops.max(y_pred) - ops.min(y_pred))
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return ops.sqrt(loss) + 0.1 * ops.std(y_pred)


class OwnMetrics(Base):
    """A compute_metrics that adds a result and keeps a metric of its own."""

    def __init__(self):
        super().__init__()
        self.positive = keras.metrics.Sum(name="positive")

    @property
    def metrics(self):
        return [*super().metrics, self.positive]

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        self.positive.update_state(ops.cast(y_pred > 0, "float32"))
        return results | {"positive_share": self.positive.result() / ROWS}


class OwnPrediction(Base):
    """A predict_step that returns a dict."""

    def predict_step(self, state, data):
        outputs, other = super().predict_step(state, data)
        return {"score": outputs, "positive": outputs > 0}, other


OVERRIDDEN = [
    OwnSteps,
    LogsWithoutMetrics,
    ClippedByRows,
    OwnLoss,
    OwnMetrics,
    OwnPrediction,
]


@pytest.mark.parametrize("model", OVERRIDDEN)
def test_overridden_model_matches_one_device(model):
    drive = fit_evaluate_predict(*numbers(), test_batch_size=16)
    check(lambda: built(model), compiled(metrics=["mae"]), drive)


def test_own_train_step_on_single_batches_matches_one_device():
    x, y = numbers(11)

    def drive(model):
        return [
            model.train_on_batch(x[:8], y[:8], return_dict=True),
            model.train_on_batch(x[8:], y[8:], return_dict=True),
            model.test_on_batch(x, y, return_dict=True),
        ]

    check(lambda: built(OwnSteps), compiled(), drive)


def test_own_train_step_with_class_of_optimizer_matches_one_device():
    def compile_args():
        return {"optimizer": keras.optimizers.Adam(0.01, global_clipnorm=0.1)}

    check(lambda: built(OwnSteps), compile_args, fit(*numbers()))
