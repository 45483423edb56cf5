"""Randomness: other masks on each replica, the same run under the same seed."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from parity import (
    REPLICAS,
    assert_same,
    check,
    compiled,
    fit,
    mirrored,
    numbers,
    run_on_one_device,
    run_on_replicas,
)

FEATURES = 64


class Scale(layers.Layer):
    """One weight per feature, whose gradient sums what passed, over the rows."""

    def build(self, shape):
        self.weight = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, inputs):
        return inputs * self.weight


def masks(layer, seed=7, rows=8):
    """The mask of each row, read from the gradients of a linear model.

    With the loss sum(outputs * target) the gradient of `Scale` is the sum over
    rows of mask * target; targets of powers of 3 tell the rows apart, and SGD at
    rate 1 leaves the gradient in the weight.
    """

    def build():
        inputs = keras.Input((FEATURES,))
        return keras.Model(inputs, Scale()(layer()(inputs)))

    def loss(y_true, y_pred):
        return ops.sum(y_true * y_pred, axis=-1)

    def compile_args():
        return {"optimizer": keras.optimizers.SGD(1.0), "loss": loss}

    ones = np.ones((rows, FEATURES), "float32")
    place = (3.0 ** np.arange(rows)).astype("float32")
    targets = np.repeat(place[:, None], FEATURES, axis=1)

    def drive(model):
        model.train_on_batch(ones, targets)
        return model.get_weights()[0]

    got = run_on_replicas(build, compile_args, drive, seed=seed)
    sums = np.rint((1.0 - got.result.astype("float64")) * rows / 2).astype(int)
    return np.stack([sums // 3**row % 3 for row in range(rows)]), got


def dropout():
    return layers.Dropout(0.5)


def test_masks_differ_between_replicas():
    mask, _ = masks(dropout)
    assert set(np.unique(mask)) == {0, 1}, "the gradients do not give the masks"
    of_replicas = mask.reshape(REPLICAS, -1, FEATURES)
    for first in range(REPLICAS):
        for second in range(first + 1, REPLICAS):
            assert not np.array_equal(of_replicas[first], of_replicas[second])


def test_masks_of_rows_differ_and_keep_the_rate():
    mask, _ = masks(dropout)
    assert len({row.tobytes() for row in mask}) == len(mask)
    # 512 draws of 1/2: the standard deviation of the mean is 0.022.
    assert abs(mask.mean() - 0.5) < 0.09


def test_masks_repeat_under_a_seed():
    first, second, other = (masks(dropout, seed=seed)[0] for seed in (7, 7, 8))
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, other)


def test_layer_with_its_own_seed_repeats():
    first, second = (masks(lambda: layers.Dropout(0.5, seed=5), seed=s) for s in (1, 2))
    np.testing.assert_array_equal(first[0], second[0])


def test_masks_change_from_step_to_step():
    x = np.ones((16, FEATURES), "float32")

    def build():
        return keras.Sequential([keras.Input((FEATURES,)), dropout(), layers.Dense(1)])

    def drive(model):
        return [model.train_on_batch(x, x[:, :1]) for _ in range(3)]

    compile_args = lambda: {"optimizer": keras.optimizers.SGD(0.0), "loss": "mse"}  # noqa: E731
    got = run_on_replicas(build, compile_args, drive)
    assert len({float(loss) for loss in got.result}) == 3


# The state of the generators ------------------------------------------------

NOISY = {
    "dropout": lambda: layers.Dropout(0.3),
    "spatial_dropout": lambda: keras.Sequential(
        [layers.Reshape((2, 4)), layers.SpatialDropout1D(0.3), layers.Flatten()]
    ),
    "gaussian_noise": lambda: layers.GaussianNoise(0.3),
    "gaussian_dropout": lambda: layers.GaussianDropout(0.3),
    "alpha_dropout": lambda: layers.AlphaDropout(0.3),
}


def noisy(name):
    dense = layers.Dense(8, activation="tanh")
    stack = [keras.Input((6,)), dense, NOISY[name](), layers.Dense(1)]
    return keras.Sequential(stack)


def seed_states(model):
    """The counters of all seed generators, which are no weights."""
    found = [v for v in model.variables if "seed_generator_state" in v.path]
    assert found, "the model holds no seed generator"
    return [np.asarray(v.value) for v in found]


@pytest.mark.parametrize("name", NOISY)
def test_seed_state_after_training_equals_one_device_s(name):
    train = fit(*numbers())
    want = run_on_one_device(lambda: noisy(name), compiled(), train)
    got = run_on_replicas(lambda: noisy(name), compiled(), train)
    assert_same("seeds", seed_states(got.model), seed_states(want.model), 0)
    assert np.isfinite(got.result["history"]["loss"]).all()


def test_training_repeats_under_a_seed():
    train = fit(*numbers())
    first, second = (
        run_on_replicas(lambda: noisy("dropout"), compiled(), train) for _ in range(2)
    )
    assert_same("state", second.state, first.state, 0)


def test_predict_drops_nothing():
    x, y = numbers()

    def drive(model):
        return model.predict(x, batch_size=8, verbose=0)

    want = run_on_one_device(lambda: noisy("dropout"), compiled(), drive)
    got = run_on_replicas(lambda: noisy("dropout"), compiled(), drive)
    assert_same("predict", got.result, want.result)


def test_global_view_draws_the_masks_of_one_device():
    drive = fit(*numbers())
    strategy = mirrored(view="global")
    check(lambda: noisy("dropout"), compiled(), drive, strategy=strategy)


def test_random_crop_and_flip_train():
    """Preprocessing layers that draw for each image inside the model."""
    rng = np.random.default_rng(2)
    images = rng.normal(size=(16, 6, 6, 1)).astype("float32")

    def build():
        return keras.Sequential(
            [
                keras.Input((6, 6, 1)),
                layers.RandomFlip(),
                layers.RandomTranslation(0.2, 0.2),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )

    train = fit(images, images.mean(axis=(1, 2)))
    want = run_on_one_device(build, compiled(), train)
    got = run_on_replicas(build, compiled(), train)
    assert_same("seeds", seed_states(got.model), seed_states(want.model), 0)
    assert np.isfinite(got.result["history"]["loss"]).all()
