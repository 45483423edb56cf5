"""Trains one script on one device and on four replicas, and compares.

`check(build, compile_args, drive)` is the whole claim of keras_mirror: the same
script gives the same start, weights, optimizer slots and results. `build` makes
a model, `compile_args` a fresh dict of `compile` arguments, and `drive(model)`
uses the model and returns what the user would look at.
"""

import dataclasses
import re

import keras
import numpy as np

import keras_mirror as km

REPLICAS = 4
TOLERANCE = 1e-5
# In batches of 8 these are three full batches and one of 2 rows, fewer than the
# replicas: each script meets both views of a step.
ROWS = 26


@dataclasses.dataclass
class Run:
    """One side of a comparison. `start` is None for a model built by `drive`."""

    model: keras.Model
    start: list | None
    result: object

    @property
    def state(self):
        """Every variable by position and path, optimizer slots included."""
        found = list(self.model.variables)
        if getattr(self.model, "optimizer", None) is not None:
            found += self.model.optimizer.variables
        return {
            f"{number} {without_counter(variable.path)}": to_numpy(variable)
            for number, variable in enumerate(found)
        }


def without_counter(path):
    """`dense_3/kernel` and `dense_4/kernel` are the same variable in two runs."""
    return re.sub(r"_\d+(?=/|$)", "", path)


def to_numpy(variable):
    value = np.asarray(keras.ops.convert_to_numpy(variable))
    return value if value.dtype.kind in "biu" else value.astype("float64")


# Comparing ------------------------------------------------------------------


def flatten(value, path=""):
    """(path, array) for each leaf of a nest of dicts, lists and arrays."""
    if isinstance(value, dict):
        for key in value:
            yield from flatten(value[key], f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from flatten(part, f"{path}/{index}")
    else:
        yield path, to_numpy(value)


def assert_same(label, got, want, tolerance=TOLERANCE):
    """Fails unless |got - want| <= tolerance * (1 + |want|) everywhere."""
    got, want = dict(flatten(got)), dict(flatten(want))
    assert list(got) == list(want), f"{label}: the keys differ"
    faults = []
    for path, expected in want.items():
        actual = got[path]
        where = f"{label}{path}"
        if actual.shape != expected.shape:
            faults.append(f"{where}: shape {actual.shape}, want {expected.shape}")
        elif not np.allclose(
            actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True
        ):
            off = np.nanmax(np.abs(actual - expected) / (1 + np.abs(expected)))
            faults.append(
                f"{where}: off by {off:.3g} (allowed {tolerance:g}),"
                f" got {actual.ravel()[:4]}, want {expected.ravel()[:4]}"
            )
    assert not faults, "\n".join(faults)


def assert_moved(run):
    """Guards against a vacuous pass: training has to change the weights."""
    if run.start is None:
        losses = run.result["history"]["loss"]
        assert losses[0] != losses[-1], "the loss never changed"
        return
    change = max(
        np.max(np.abs(after - before))
        for after, before in zip(run.model.get_weights(), run.start, strict=True)
    )
    assert change > 1e-4, f"the weights barely moved ({change:.2g})"


def device_count(model):
    """Over how many devices the trainable variables lie (they must agree).

    On TensorFlow they lie on one; there it is how many replicas the calls ran on.
    """
    if keras.config.backend() == "tensorflow":
        calls = [model.train_function, model.test_function, model.predict_function]
        strategies = {getattr(call, "strategy", None) for call in calls if call}
        assert len(strategies) == 1, strategies
        strategy = strategies.pop()
        return 1 if strategy is None else strategy.num_replicas_in_sync
    counts = {len(v.value.sharding.device_set) for v in model.trainable_variables}
    assert len(counts) == 1, f"variables lie on different numbers of devices {counts}"
    return counts.pop()


# The two runs ---------------------------------------------------------------


def run_on_one_device(build, compile_args, drive, *, seed=7):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)
    model = build()
    model.compile(**compile_args())
    return drive_and_record(model, drive)


def run_on_replicas(build, compile_args, drive, *, strategy=None, seed=7):
    strategy = strategy or mirrored()
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = build()
        model.compile(**compile_args())
    return drive_and_record(model, drive)


def drive_and_record(model, drive):
    start = model.get_weights() if model.built else None
    return Run(model, start, drive(model))


def mirrored(replicas=REPLICAS, **options):
    if replicas != REPLICAS:
        options["devices"] = keras.distribution.list_devices()[:replicas]
    strategy = km.MirroredStrategy(**options)
    assert strategy.num_replicas_in_sync == replicas
    return strategy


def check(build, compile_args, drive, *, tolerance=TOLERANCE, strategy=None, seed=7):
    """Both runs, compared in everything. Returns (one device, replicas)."""
    want = run_on_one_device(build, compile_args, drive, seed=seed)
    assert_moved(want)
    got = run_on_replicas(build, compile_args, drive, strategy=strategy, seed=seed)
    assert_same_runs(got, want, tolerance)
    return want, got


def assert_same_runs(got, want, tolerance=TOLERANCE, replicas=REPLICAS):
    assert device_count(want.model) == 1
    assert device_count(got.model) == replicas
    if want.start is not None:
        assert_same("start", got.start, want.start, 0)
    assert_same("result", got.result, want.result, tolerance)
    assert_same("state", got.state, want.state, tolerance)


# What most scripts do -------------------------------------------------------


def sgd(learning_rate=0.1):
    """SGD shows a sum taken for a mean; Adam divides such a factor out."""
    return keras.optimizers.SGD(learning_rate, momentum=0.9)


def compiled(loss="mse", learning_rate=0.1, **more):
    """`compile` arguments for a table; `more` must hold no stateful object."""
    return lambda: {"optimizer": sgd(learning_rate), "loss": loss, **more}


def fit(x, y=None, *, batch_size=8, epochs=2, shuffle=False, **more):
    """A `drive` that only trains, for claims that end with training."""

    def drive(model):
        history = model.fit(
            x,
            y,
            batch_size=batch_size,
            epochs=epochs,
            shuffle=shuffle,
            verbose=0,
            **more,
        )
        return {"history": history.history}

    return drive


def fit_evaluate_predict(
    x, y=None, *, sample_weight=None, batch_size=8, test_batch_size=ROWS, **more
):
    """A `drive` through the three calls that every user makes.

    evaluate and predict take all rows at once, to compile one program each; the
    tests of data cover other batch sizes.
    """
    train = fit(x, y, batch_size=batch_size, sample_weight=sample_weight, **more)

    def drive(model):
        result = train(model)
        result["evaluate"] = model.evaluate(
            x,
            y,
            batch_size=test_batch_size,
            sample_weight=sample_weight,
            verbose=0,
            return_dict=True,
        )
        result["predict"] = model.predict(x, batch_size=test_batch_size, verbose=0)
        return result

    return drive


def numbers(rows=ROWS, inputs=6, outputs=1, seed=3):
    """A regression problem whose rows are far from interchangeable."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, inputs)).astype("float32")
    w = rng.normal(size=(inputs, outputs)).astype("float32")
    trend = np.linspace(-1.0, 1.0, rows, dtype="float32")[:, None]
    return x, (np.tanh(x @ w) + trend).astype("float32")


def weights_of_rows(rows=ROWS):
    """Sample weights that sum to something else on each replica."""
    return np.linspace(0.1, 3.0, rows).astype("float32") ** 2


def mlp(inputs=6, units=8, outputs=1, activation=None):
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            keras.layers.Dense(units, activation="tanh"),
            keras.layers.Dense(outputs, activation=activation),
        ]
    )


# One model on its way in and between strategies -----------------------------

train_on_numbers = fit_evaluate_predict(*numbers())


def fresh():
    """An uncompiled model with the same weights each time."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    return mlp()


def compile_with(model, **distribution):
    model.compile(optimizer=sgd(), loss="mse", **distribution)
    return model


def assert_trains_like(one_device, model, devices):
    """`train_on_numbers` gives what it gave in the run `one_device`."""
    result = train_on_numbers(model)
    assert device_count(model) == devices
    assert_same("weights", model.get_weights(), one_device.model.get_weights())
    assert_same("result", result, one_device.result)
