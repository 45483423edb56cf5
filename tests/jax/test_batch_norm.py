"""BatchNormalization: statistics of each replica's rows, or of the whole batch."""

import keras
import numpy as np
import pytest
from keras import layers
from parity import (
    REPLICAS,
    ROWS,
    assert_same,
    check,
    compiled,
    fit,
    fit_evaluate_predict,
    mirrored,
    numbers,
    run_on_one_device,
    run_on_replicas,
)

MOMENTUM, BATCH = 0.6, 8
x, y = numbers(24)
# Rows drift, so that the variance within a replica is below that of the batch.
x = x * np.linspace(0.5, 3.0, 6, dtype="float32")
x = x + np.arange(24, dtype="float32")[:, None] / 8


def normalized(**options):
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.BatchNormalization(momentum=MOMENTUM, name="first", **options),
            layers.Dense(4, activation="tanh"),
            layers.BatchNormalization(momentum=MOMENTUM),
            layers.Dense(1),
        ]
    )


def moving_statistics(replicas):
    """What `first` must hold after one epoch, by NumPy in float64."""
    mean, variance = np.zeros(6), np.ones(6)
    for start in range(0, len(x), BATCH):
        rows = x[start : start + BATCH].astype("float64")
        of_replicas = rows.reshape(replicas, -1, 6).var(axis=1).mean(axis=0)
        mean = MOMENTUM * mean + (1 - MOMENTUM) * rows.mean(axis=0)
        variance = MOMENTUM * variance + (1 - MOMENTUM) * of_replicas
    return {"mean": mean, "variance": variance}


def statistics_of(model):
    first = model.get_layer("first")
    return {
        "mean": np.asarray(first.moving_mean.value),
        "variance": np.asarray(first.moving_variance.value),
    }


ONE_EPOCH = fit(x, y, epochs=1)


def test_moving_mean_is_the_batch_s_and_variance_the_mean_over_replicas():
    got = run_on_replicas(normalized, compiled(), ONE_EPOCH)
    assert_same("moving", statistics_of(got.model), moving_statistics(REPLICAS))


def test_one_device_has_the_variance_of_the_whole_batch():
    """The NumPy figures themselves are right, and differ between the two."""
    want = run_on_one_device(normalized, compiled(), ONE_EPOCH)
    assert_same("moving", statistics_of(want.model), moving_statistics(1))
    gap = moving_statistics(1)["variance"] - moving_statistics(REPLICAS)["variance"]
    assert np.abs(gap).min() > 1e-3


def test_two_replicas_merge_the_statistics_of_two():
    got = run_on_replicas(normalized, compiled(), ONE_EPOCH, strategy=mirrored(2))
    assert_same("moving", statistics_of(got.model), moving_statistics(2))


def test_each_replica_normalizes_its_own_rows():
    """The loss of the first step, by NumPy from the untrained weights."""
    got = run_on_replicas(
        normalized,
        compiled(),
        lambda model: model.train_on_batch(x[:BATCH], y[:BATCH]),
    )
    _, _, _, _, kernel, bias, *_, last_kernel, last_bias = got.start
    outputs = []
    for rows in np.split(x[:BATCH].astype("float64"), REPLICAS):
        hidden = np.tanh(normalize(rows) @ kernel + bias)
        outputs.append(normalize(hidden) @ last_kernel + last_bias)
    want = np.mean((np.concatenate(outputs) - y[:BATCH]) ** 2)
    assert_same("loss", np.asarray(got.result), want)


def normalize(rows, epsilon=1e-3):
    return (rows - rows.mean(axis=0)) / np.sqrt(rows.var(axis=0) + epsilon)


def test_statistics_are_equal_on_all_devices_after_training():
    got = run_on_replicas(normalized, compiled(), ONE_EPOCH)
    for variable in got.model.variables:
        first, *others = (np.asarray(s.data) for s in variable.value.addressable_shards)
        assert len(others) == REPLICAS - 1
        for other in others:
            np.testing.assert_array_equal(first, other)


# Statistics of the whole batch ----------------------------------------------


@pytest.mark.parametrize("rows", [24, ROWS], ids=["whole_batches", "tail"])
def test_synchronized_strategy_matches_one_device(rows):
    strategy = mirrored(synchronize_batch_norm=True)
    drive = fit_evaluate_predict(*numbers(rows))
    check(normalized, compiled(), drive, strategy=strategy)


def test_synchronized_convolution_matches_one_device():
    rng = np.random.default_rng(3)
    images = rng.normal(size=(ROWS, 6, 6, 2)).astype("float32")
    images += np.arange(ROWS, dtype="float32")[:, None, None, None] / 8

    def build():
        return keras.Sequential(
            [
                keras.Input((6, 6, 2)),
                layers.Conv2D(4, 3, use_bias=False),
                layers.BatchNormalization(momentum=MOMENTUM),
                layers.Activation("tanh"),
                layers.GlobalAveragePooling2D(),
                layers.Dense(1),
            ]
        )

    strategy = mirrored(synchronize_batch_norm=True)
    drive = fit_evaluate_predict(images, numbers()[1])
    check(build, compiled(), drive, strategy=strategy)


def test_global_view_matches_one_device():
    strategy = mirrored(view="global")
    drive = fit_evaluate_predict(*numbers())
    check(normalized, compiled(), drive, strategy=strategy)


# Where no statistic is taken, nothing differs -------------------------------


def test_evaluate_and_predict_match_one_device():
    """The weights of a trained model, moved over: inference has no replicas."""
    trained = run_on_one_device(normalized, compiled(), ONE_EPOCH).model
    weights = trained.get_weights()

    def drive(model):
        model.set_weights(weights)
        return {
            "evaluate": model.evaluate(x, y, batch_size=BATCH, verbose=0),
            "predict": model.predict(x, batch_size=7, verbose=0),
        }

    want = run_on_one_device(normalized, compiled(), drive)
    got = run_on_replicas(normalized, compiled(), drive)
    assert_same("result", got.result, want.result)


def test_frozen_statistics_match_one_device():
    def build():
        model = normalized()
        for layer in model.layers:
            if isinstance(layer, layers.BatchNormalization):
                layer.trainable = False
        return model

    check(build, compiled(learning_rate=0.01), fit_evaluate_predict(*numbers()))


def test_tail_is_normalized_as_one_batch():
    """A batch that the replicas do not divide has the statistics of one device."""
    drive = fit(x[:7], y[:7], batch_size=7)
    check(normalized, compiled(), drive)
