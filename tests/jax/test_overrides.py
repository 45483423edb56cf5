"""Models with steps, losses and metrics of their own."""

import jax
import keras
import pytest
from keras import layers, ops
from parity import (
    ROWS,
    check,
    compiled,
    fit,
    fit_evaluate_predict,
    numbers,
)


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
