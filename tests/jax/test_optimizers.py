"""Every Keras optimizer, each option of the base class, and learning rates."""

import inspect

import keras
import numpy as np
import pytest
from keras import optimizers
from keras.optimizers import schedules
from parity import ROWS, check, fit, mlp, numbers, sgd

# Even those that divide a gradient by its own size (Adam and its kin), take its
# sign (Lion) or its orthogonal factor (Muon) stay within the common tolerance: no
# gradient of this problem is as small as the noise of a float32 sum.
OPTIMIZERS = {
    "Adadelta": {"learning_rate": 1.0},
    "Adafactor": {"learning_rate": 0.05},
    "Adagrad": {"learning_rate": 0.05},
    "Adam": {"learning_rate": 0.01, "amsgrad": True},
    "AdamW": {"learning_rate": 0.01, "weight_decay": 0.1},
    "Adamax": {"learning_rate": 0.01},
    "Ftrl": {"learning_rate": 0.05, "l1_regularization_strength": 0.01},
    "Lamb": {"learning_rate": 0.01},
    "Lion": {"learning_rate": 0.01},
    "Muon": {"learning_rate": 0.01},
    "Nadam": {"learning_rate": 0.01},
    "RMSprop": {"learning_rate": 0.01, "momentum": 0.5, "centered": True},
    "SGD": {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True},
    "ScheduleFreeAdamW": {"learning_rate": 0.01},
}
# Bases, and wrappers with tests of their own (MultiOptimizer below,
# LossScaleOptimizer in test_precision.py).
NOT_ALONE = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap"}


def check_optimizer(make, *, rows=ROWS, callbacks=lambda: None, **fit_more):
    x, y = numbers(rows)

    def compile_args():
        return {"optimizer": make(), "loss": "mse"}

    def drive(model):
        result = fit(x, y, callbacks=callbacks(), **fit_more)(model)
        result["rate"] = float(model.optimizer.learning_rate)
        result["iterations"] = int(model.optimizer.iterations)
        return result

    return check(mlp, compile_args, drive)


def test_table_names_every_keras_optimizer():
    found = {
        name
        for name, value in vars(optimizers).items()
        if inspect.isclass(value) and name[0].isupper()
    }
    assert found - NOT_ALONE == set(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_matches_one_device(name):
    make = getattr(optimizers, name)
    check_optimizer(lambda: make(**OPTIMIZERS[name]), rows=24)


# The limits are far below the gradients' norms: clipping before the mean over
# replicas would give other gradients.
OPTIONS = {
    "clipnorm": {"clipnorm": 0.05},
    "clipvalue": {"clipvalue": 0.02},
    "global_clipnorm": {"global_clipnorm": 0.05},
    "weight_decay": {"weight_decay": 0.05},
    "ema": {"use_ema": True, "ema_momentum": 0.7},
    "ema_overwrite": {
        "use_ema": True,
        "ema_momentum": 0.7,
        "ema_overwrite_frequency": 3,
    },
    "accumulation": {"gradient_accumulation_steps": 2},
    "accumulation_unfinished": {"gradient_accumulation_steps": 3},
    "accumulation_and_clipping": {
        "gradient_accumulation_steps": 2,
        "global_clipnorm": 0.05,
    },
    "loss_scale_factor": {"loss_scale_factor": 128.0},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_option_matches_one_device(name):
    check_optimizer(lambda: optimizers.SGD(0.1, momentum=0.9, **OPTIONS[name]))


def test_adam_with_every_option_matches_one_device():
    check_optimizer(
        lambda: optimizers.Adam(
            0.01,
            weight_decay=0.05,
            global_clipnorm=0.05,
            use_ema=True,
            ema_momentum=0.7,
            ema_overwrite_frequency=2,
            gradient_accumulation_steps=2,
        )
    )


def test_excluded_weights_are_not_decayed():
    def make():
        optimizer = optimizers.AdamW(0.01, weight_decay=0.1)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return optimizer

    check_optimizer(make)


def test_multi_optimizer_matches_one_device():
    def make():
        by_path = optimizers.OptimizerMap(optimizers.Adam(0.01))
        by_path[".*bias"] = optimizers.SGD(0.01, momentum=0.9)
        return optimizers.MultiOptimizer(by_path)

    x, y = numbers()
    check(mlp, lambda: {"optimizer": make(), "loss": "mse"}, fit(x, y))


# Learning rates -------------------------------------------------------------

SCHEDULES = {
    "cosine_with_warmup": lambda: schedules.CosineDecay(
        0.0, 8, warmup_target=0.2, warmup_steps=3
    ),
    "piecewise": lambda: schedules.PiecewiseConstantDecay([2, 5], [0.2, 0.1, 0.05]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_matches_one_device(name):
    check_optimizer(lambda: optimizers.SGD(SCHEDULES[name](), momentum=0.9))


def test_learning_rate_scheduler_matches_one_device():
    def callbacks():
        halve = lambda epoch, rate: rate * 0.5  # noqa: E731
        return [keras.callbacks.LearningRateScheduler(halve)]

    want, _ = check_optimizer(sgd, callbacks=callbacks, epochs=3)
    assert want.result["rate"] == pytest.approx(0.0125)


def test_reduce_on_plateau_matches_one_device():
    def callbacks():
        # No epoch improves by 10, so that the rate falls after each but the first.
        return [
            keras.callbacks.ReduceLROnPlateau(
                monitor="loss", factor=0.1, patience=1, min_delta=10.0
            )
        ]

    want, _ = check_optimizer(sgd, callbacks=callbacks, epochs=3)
    assert want.result["rate"] == pytest.approx(0.001)


def test_rate_set_between_calls_matches_one_device():
    x, y = numbers()
    train = fit(x, y)

    def drive(model):
        first = train(model)
        model.optimizer.learning_rate = 0.01
        second = train(model)
        rate = float(model.optimizer.learning_rate)
        return {"history": first["history"], "second": second, "rate": rate}

    want, _ = check(mlp, lambda: {"optimizer": sgd(), "loss": "mse"}, drive)
    assert want.result["rate"] == pytest.approx(0.01)


def test_rate_set_in_a_batch_callback_matches_one_device():
    class Warmup(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.model.optimizer.learning_rate.assign(0.01 * (batch + 1))

    check_optimizer(sgd, callbacks=lambda: [Warmup()])


def test_unfinished_accumulation_continues_in_the_next_fit():
    """Seven batches by twos leave one gradient for the call that follows."""
    x, y = numbers(14)

    def compile_args():
        optimizer = optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)
        return {"optimizer": optimizer, "loss": "mse"}

    def drive(model):
        first = fit(x, y, batch_size=2, epochs=1)(model)
        between = model.get_weights()
        return first | {"between": between, "second": fit(x, y, epochs=1)(model)}

    want, _ = check(mlp, compile_args, drive)
    assert not np.allclose(want.result["between"][0], want.model.get_weights()[0])
