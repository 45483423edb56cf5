"""mixed_float16 with loss scaling, mixed_bfloat16, and float64."""

import keras
import numpy as np
import pytest
from keras import layers, optimizers
from parity import (
    assert_same,
    check,
    compiled,
    fit,
    fit_evaluate_predict,
    mirrored,
    mlp,
    numbers,
    run_on_one_device,
    run_on_replicas,
    sgd,
)

# A 16-bit gradient of a weight is a sum over rows that is rounded to 11 bits
# (float16) or 8 bits (bfloat16) of mantissa. Each replica rounds its part of that
# sum, one device rounds the whole: they differ by about 2**-11 and 2**-8 of the
# gradient, times the 8 steps that are taken here.
FLOAT16, BFLOAT16 = 2e-3, 2e-2


def mixed(policy):
    def build():
        stack = [
            layers.Dense(8, activation="tanh", dtype=policy),
            layers.Dense(1, dtype=policy),
            layers.Activation("linear", dtype="float32"),
        ]
        return keras.Sequential([keras.Input((6,)), *stack])

    return build


def scaled(**options):
    return lambda: {
        "optimizer": optimizers.LossScaleOptimizer(sgd(), **options),
        "loss": "mse",
    }


def with_scale(drive):
    """Adds the loss scale and the inner step count to what `drive` returns."""

    def both(model):
        result = drive(model)
        result["scale"] = float(model.optimizer.dynamic_scale)
        result["steps"] = int(model.optimizer.inner_optimizer.iterations)
        return result

    return both


@pytest.mark.parametrize(
    ("policy", "tolerance"),
    [("mixed_bfloat16", BFLOAT16), ("mixed_float16", FLOAT16)],
)
def test_mixed_precision_matches_one_device(policy, tolerance):
    drive = fit_evaluate_predict(*numbers())
    compile_args = lambda: {"optimizer": sgd(), "loss": "mse"}  # noqa: E731
    _, got = check(mixed(policy), compile_args, drive, tolerance=tolerance)
    assert {v.dtype for v in got.model.trainable_variables} == {"float32"}


def test_global_policy_wraps_the_optimizer_as_on_one_device():
    drive = with_scale(fit(*numbers()))

    def build():
        keras.config.set_dtype_policy("mixed_float16")
        dense = layers.Dense(8, activation="tanh")
        return keras.Sequential([keras.Input((6,)), dense, layers.Dense(1)])

    compile_args = lambda: {"optimizer": sgd(), "loss": "mse"}  # noqa: E731
    want, _ = check(build, compile_args, drive, tolerance=FLOAT16)
    assert 0 < want.result["steps"] <= 8


@pytest.mark.parametrize("view", ["auto", "replica"])
def test_float8_scales_are_those_of_one_device(view):
    x, y = numbers(16)

    def build():
        model = mlp()
        for dense in model.layers:
            dense.quantize("float8")
        return model

    # A gradient of a bias is a sum that is rounded to bfloat16.
    strategy = mirrored(view=view)
    check(build, compiled(), fit(x, y), strategy=strategy, tolerance=FLOAT16)


def test_float32_loss_scaling_matches_one_device_exactly():
    """In float32 nothing overflows and a scale of 2**k changes no digit."""
    drive = with_scale(fit(*numbers()))
    compile_args = scaled(initial_scale=2.0**10, dynamic_growth_steps=3)
    want, _ = check(mixed("float32"), compile_args, drive)
    assert want.result["scale"] == 2.0**12


def overflowing(rows):
    """float16 ends at 65504: in these rows the targets are out of reach."""
    x, y = numbers(8)
    y[rows] = 3e4
    return x, y


@pytest.mark.parametrize(
    "rows",
    [[0], [2, 3], [7], [0, 1, 2, 3, 4, 5, 6, 7]],
    ids=["first_replica", "second_replica", "last_replica", "all"],
)
def test_all_replicas_skip_when_one_overflows(rows):
    """The scaled gradient of a few rows is infinite, all others are finite."""
    x, y = overflowing(rows)

    def drive(model):
        before = model.get_weights()
        logs = model.train_on_batch(x, y, return_dict=True)
        return {
            "logs": logs,
            "moved": [a - b for a, b in zip(model.get_weights(), before, strict=True)],
            "scale": float(model.optimizer.dynamic_scale),
            "steps": int(model.optimizer.inner_optimizer.iterations),
        }

    sides = [
        run(mixed("mixed_float16"), scaled(initial_scale=2.0**14), drive)
        for run in (run_on_one_device, run_on_replicas)
    ]
    for side in sides:
        assert side.result["scale"] == 2.0**13
        assert side.result["steps"] == 0
        assert not any(np.any(change) for change in side.result["moved"])
    assert_same("result", sides[1].result, sides[0].result, FLOAT16)


def test_training_goes_on_after_an_overflow():
    """Steps overflow until the scale has fallen far enough; then it grows."""
    x, y = numbers(16)
    y[3] = 300.0
    drive = with_scale(fit(x, y, epochs=4))
    compile_args = scaled(initial_scale=2.0**14, dynamic_growth_steps=4)
    want, got = (
        run(mixed("mixed_float16"), compile_args, drive)
        for run in (run_on_one_device, run_on_replicas)
    )
    assert 0 < want.result["steps"] < 8, "no step overflowed, or all did"
    assert got.result["scale"] == want.result["scale"]
    assert got.result["steps"] == want.result["steps"]


def test_an_overflow_of_the_whole_sum_alone_is_seen_in_the_global_view():
    """In the replica view no replica's own sum overflows, and the step is taken."""
    x, _ = numbers(16)
    y = 2 * x[:, :1] + 1
    applied = {}
    for view in ("plain", "global", "replica"):
        keras.utils.set_random_seed(7)
        model = mixed("mixed_float16")()
        strategy = None if view == "plain" else mirrored(view=view)
        model.compile(**scaled(initial_scale=2.0**15)(), distribution=strategy)
        model.train_on_batch(x, y)
        applied[view] = int(model.optimizer.inner_optimizer.iterations)
    assert applied == {"plain": 0, "global": 0, "replica": 1}


def test_overflow_with_accumulation_and_clipping_matches_one_device():
    x, y = numbers(16)
    x[:, 0] += 1.0

    def compile_args():
        inner = optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.05)
        optimizer = optimizers.LossScaleOptimizer(inner, initial_scale=2.0**8)
        return {"optimizer": optimizer, "loss": "mse"}

    check(mixed("float32"), compile_args, with_scale(fit(x, y)))
