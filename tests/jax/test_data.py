"""Every form of data that Keras takes, and every way to cut it into batches."""

import contextlib
import itertools
import multiprocessing.pool
import time

import grain
import jax.numpy as jnp
import keras
import numpy as np
import pandas
import pytest
import tensorflow as tf
import torch
from keras import layers
from parity import (
    ROWS,
    assert_same_runs,
    check,
    compiled,
    fit,
    fit_evaluate_predict,
    mirrored,
    mlp,
    numbers,
    run_on_one_device,
    run_on_replicas,
    weights_of_rows,
)

BATCH = 8
x, y = numbers()


def batches(*arrays, sizes=(8, 8, 8, 2)):
    """Copies of consecutive rows, as tuples."""
    ends = np.cumsum(sizes)
    for start, end in zip(ends - np.array(sizes), ends, strict=True):
        yield tuple(array[start:end].copy() for array in arrays)


class Rows(keras.utils.PyDataset):
    def __init__(self, sizes=(8, 8, 8, 2), **options):
        super().__init__(**options)
        self.parts = list(batches(x, y, sizes=sizes))

    def __len__(self):
        return len(self.parts)

    def __getitem__(self, index):
        return self.parts[index]


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return torch.tensor(x[index]), torch.tensor(y[index])


def grain_rows():
    pairs = [(x[row], y[row]) for row in range(ROWS)]
    return grain.MapDataset.source(pairs).batch(BATCH, drop_remainder=False)


ARRAYS = {
    "numpy": np.asarray,
    "float64": lambda a: a.astype("float64"),
    "jax": jnp.asarray,
    "tensorflow": tf.convert_to_tensor,
    "torch": torch.from_numpy,
    "pandas": pandas.DataFrame,
    "not_contiguous": lambda a: np.asfortranarray(np.repeat(a, 2, axis=0)[::2]),
}
DATASETS = {
    "tf_data": lambda: tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH),
    "tf_data_of_unknown_length": lambda: tf.data.Dataset.from_generator(
        lambda: batches(x, y),
        output_signature=(
            tf.TensorSpec((None, 6), "float32"),
            tf.TensorSpec((None, 1), "float32"),
        ),
    ),
    "py_dataset": Rows,
    "torch_loader": lambda: torch.utils.data.DataLoader(Pairs(), batch_size=BATCH),
    "grain_map": grain_rows,
    "grain_iter": lambda: grain_rows().to_iter_dataset(),
}


@pytest.mark.parametrize("form", ARRAYS)
def test_arrays_match_one_device(form):
    convert = ARRAYS[form]
    check(mlp, compiled(), fit_evaluate_predict(convert(x), convert(y)))


# Keras says so wherever it does not know the length beforehand.
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.parametrize("form", DATASETS)
def test_dataset_matches_one_device(form):
    def drive(model):
        result = fit(DATASETS[form](), batch_size=None)(model)
        result["evaluate"] = model.evaluate(DATASETS[form](), verbose=0)
        result["predict"] = model.predict(DATASETS[form](), verbose=0)
        return result

    want, _ = check(mlp, compiled(), drive)
    assert want.result["predict"].shape == (ROWS, 1)


class Read(Rows):
    """Whose batches are asked for by threads, slowly."""

    def __init__(self, read, **options):
        super().__init__((7, 7, 6, 6), **options)
        self.read = read

    def __getitem__(self, index):
        self.read.append(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("ahead", [10, 1])
def test_threads_that_read_ahead_are_as_far_each_time(ahead, monkeypatch):
    """Keras stops them after it looked at a batch, and begins with what they read."""
    apply_async = multiprocessing.pool.Pool.apply_async

    def late(*args):
        time.sleep(0.05)
        return apply_async(*args)

    def trained(dataset):
        with mirrored().scope():
            model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
            model.compile("sgd", "mse")
        return model.fit(dataset, shuffle=False, epochs=2, verbose=0).history

    quickly, slowly = [], []
    keras.utils.set_random_seed(7)
    want = trained(Read(quickly, workers=2, max_queue_size=ahead))
    monkeypatch.setattr(multiprocessing.pool.Pool, "apply_async", late)
    keras.utils.set_random_seed(7)
    got = trained(Read(slowly, workers=2, max_queue_size=ahead))
    assert got == want and sorted(slowly) == sorted(quickly)


def test_a_dataset_read_ahead_matches_one_device():
    def drive(model):
        model.test_on_batch(x[:8], y[:8])  # else Keras looks at a batch
        return fit(Rows(workers=2), batch_size=None)(model)

    check(mlp, compiled(), drive)


# Batch sizes ----------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 16, ROWS])
def test_batch_size_matches_one_device(size):
    drive = fit_evaluate_predict(x, y, batch_size=size, test_batch_size=size)
    check(mlp, compiled(learning_rate=0.02), drive)


def test_single_row_matches_one_device():
    check(mlp, compiled(), fit_evaluate_predict(x[:1], y[:1], batch_size=32))


def test_batches_of_changing_size_match_one_device():
    sizes = (8, 3, 4, 1, 8, 2)

    def drive(model):
        result = fit(Rows(sizes), batch_size=None)(model)
        result["evaluate"] = model.evaluate(Rows(sizes), verbose=0)
        result["predict"] = model.predict(Rows(sizes), verbose=0)
        return result

    check(mlp, compiled(), drive)


# Generators -----------------------------------------------------------------


def endless(*arrays):
    while True:
        yield from batches(*arrays)


def test_endless_generator_matches_one_device():
    """Five steps an epoch: the epochs begin at different batches."""

    def drive(model):
        result = fit(endless(x, y), batch_size=None, steps_per_epoch=5)(model)
        result["evaluate"] = model.evaluate(endless(x, y), steps=4, verbose=0)
        result["predict"] = model.predict(endless(x, y), steps=4, verbose=0)
        return result

    check(mlp, compiled(), drive)


def test_generator_with_weights_matches_one_device():
    source = lambda: endless(x, y, weights_of_rows())  # noqa: E731
    drive = lambda model: fit(source(), batch_size=None, steps_per_epoch=4)(model)  # noqa: E731
    check(mlp, compiled(), drive)


def test_generator_without_weights_matches_one_device():
    source = lambda: ((a, b, None) for a, b in endless(x, y))  # noqa: E731
    drive = lambda model: fit(source(), batch_size=None, steps_per_epoch=4)(model)  # noqa: E731
    check(mlp, compiled(), drive)


def overwriting(copies):
    """Yields the same two buffers again and again, or copies of them."""
    buffers = np.zeros((BATCH, 6), "float32"), np.zeros((BATCH, 1), "float32")
    endless = itertools.cycle(batches(x[:24], y[:24], sizes=(8,) * 3))
    for number, batch in enumerate(endless):
        for buffer, values in zip(buffers, batch, strict=True):
            buffer[:] = values
        # Keras holds the first two to see what they are like.
        fresh = copies or number < 2
        yield tuple(buffer.copy() for buffer in buffers) if fresh else buffers


def test_generator_that_overwrites_its_buffer_matches_copies():
    """Transfers overlap steps; a batch must have left the buffer by then."""

    def drive(copies):
        source = overwriting(copies)
        return lambda model: fit(source, batch_size=None, steps_per_epoch=9)(model)

    want = run_on_one_device(mlp, compiled(), drive(copies=True))
    got = run_on_replicas(mlp, compiled(), drive(copies=False))
    assert_same_runs(got, want)


# Nests, weights, validation, epochs -----------------------------------------


def nested_model():
    left, right = keras.Input((6,), name="left"), keras.Input((6,), name="right")
    inputs = {"pair": [left, right]}
    return keras.Model(inputs, layers.Dense(1)(layers.Add()([left, right])))


def test_nested_inputs_match_one_device():
    nested = {"pair": [x, x[::-1].copy()]}
    check(nested_model, compiled(), fit_evaluate_predict(nested, y))


def test_nested_tf_data_matches_one_device():
    nested = {"pair": (x, x[::-1].copy())}
    slices = tf.data.Dataset.from_tensor_slices((nested, y, weights_of_rows()))
    drive = fit(slices.batch(BATCH), batch_size=None)
    check(nested_model, compiled(), drive)


VALIDATION = {
    "split": {"validation_split": 0.3},
    "data": {"validation_data": (x[:7], y[:7])},
    "data_with_weights": {"validation_data": (x[:7], y[:7], weights_of_rows(7))},
    "dataset": {"validation_data": Rows()},
    "batches_and_frequency": {
        "validation_data": (x[:9], y[:9]),
        "validation_batch_size": 4,
        "validation_freq": 2,
        "validation_steps": 2,
    },
}


@pytest.mark.parametrize("name", VALIDATION)
def test_validation_matches_one_device(name):
    want, _ = check(mlp, compiled(metrics=["mae"]), fit(x, y, **VALIDATION[name]))
    assert "val_loss" in want.result["history"]


def test_resuming_with_initial_epoch_matches_one_device():
    def drive(model):
        first = fit(x, y, epochs=1)(model)
        second = fit(x, y, epochs=3, initial_epoch=1)(model)
        return first | {"second": second}

    want, got = check(mlp, compiled(), drive)
    unbroken = run_on_one_device(mlp, compiled(), fit(x, y, epochs=3))
    for side in (want, got):
        np.testing.assert_allclose(
            side.model.get_weights()[0],
            unbroken.model.get_weights()[0],
            rtol=1e-5,
            atol=1e-5,
        )


@pytest.mark.parametrize("form", ["arrays", "py_dataset"])
def test_shuffling_under_a_seed_matches_one_device(form):
    def drive(model):
        keras.utils.set_random_seed(3)
        source = (x, y) if form == "arrays" else (Rows(),)
        size = BATCH if form == "arrays" else None
        return fit(*source, batch_size=size, shuffle=True)(model)

    want, _ = check(mlp, compiled(), drive)
    in_order = run_on_one_device(mlp, compiled(), fit(x, y))
    assert want.result["history"]["loss"][0] != in_order.result["history"]["loss"][0]


@pytest.mark.parametrize("dtype", ["uint8", "int32", "bool"])
def test_integer_inputs_match_one_device(dtype):
    cells = (np.abs(x) * 3).astype(dtype)

    def build():
        stack = [keras.Input((6,), dtype=dtype), layers.Rescaling(0.5), layers.Dense(1)]
        return keras.Sequential(stack)

    check(build, compiled(), fit_evaluate_predict(cells, y))


def test_a_sort_within_rows_trains_on_a_tail():
    """XLA ends the process at its derivative over rows that are divided unevenly."""

    def build():
        inputs = keras.Input((6,))
        hidden = keras.layers.Dense(8)(inputs)
        best = keras.ops.sort(hidden, axis=-1)[:, -3:]
        return keras.Model(inputs, keras.layers.Dense(1)(best))

    _, got = check(build, compiled(), fit(x, y))
    assert got.model.train_function.step.views == {"replica": 6, "global": 2}


def test_tf_data_inside_of_a_scope_matches_one_device():
    def drive(scope):
        def inside(model):
            dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
            with scope:
                history = model.fit(dataset, shuffle=False, verbose=0).history
            return {"history": history}

        return inside

    one = run_on_one_device(mlp, compiled(), drive(contextlib.nullcontext()))
    strategy = mirrored()
    many = run_on_replicas(mlp, compiled(), drive(strategy.scope()), strategy=strategy)
    assert_same_runs(many, one)
