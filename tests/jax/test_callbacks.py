"""Callbacks see global values, and may read and save the model at any batch."""

import csv
import functools
import warnings
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
from keras import callbacks
from parity import (
    assert_same,
    check,
    compiled,
    fit,
    mlp,
    numbers,
    run_on_one_device,
    run_on_replicas,
)

x, y = numbers()
VALIDATION = (x[:7] * 0.5, y[:7])


def check_with(make_callbacks, compile_args=None, **fit_arguments):
    """Parity of a `fit` with callbacks; they are made anew for each side."""

    def drive(model):
        made = make_callbacks()
        result = fit(x, y, callbacks=made, **fit_arguments)(model)
        seen = [callback.seen for callback in made if hasattr(callback, "seen")]
        # Also where on_train_end sets the weights, as restoring the best does.
        evaluated = model.evaluate(x, y, batch_size=8, verbose=0)
        return result | {"seen": seen, "evaluate": evaluated}

    return check(mlp, compile_args or compiled(metrics=["mae"]), drive)


class Watch(callbacks.Callback):
    """What a user's callback can look at after each batch."""

    def __init__(self, folder=None):
        super().__init__()
        self.seen, self.folder = [], folder

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(
            {
                "batch": batch,
                "logs": {name: float(value) for name, value in logs.items()},
                "weights": self.model.get_weights(),
                "iterations": int(self.model.optimizer.iterations),
                "rate": float(self.model.optimizer.learning_rate),
            }
        )

    def on_test_batch_end(self, batch, logs=None):
        logs = {name: float(value) for name, value in logs.items()}
        self.seen.append({"tested": batch, "logs": logs})


def test_batch_callback_sees_the_state_of_one_device():
    want, _ = check_with(lambda: [Watch()], validation_data=VALIDATION)
    steps = [seen["iterations"] for seen in want.result["seen"][0] if "batch" in seen]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8]


class Interfere(callbacks.Callback):
    """Sets weights, evaluates and predicts while training runs."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            halved = [0.5 * weight for weight in self.model.get_weights()]
            self.model.set_weights(halved)

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(self.model.predict(x, batch_size=8, verbose=0))


def test_callback_that_sets_weights_matches_one_device():
    check_with(lambda: [Interfere()])


# Keras' own -----------------------------------------------------------------


def test_early_stopping_restores_the_weights_of_one_device():
    def stop():
        # The loss falls, so that "max" takes the first epoch for the best.
        return [
            callbacks.EarlyStopping(
                "loss", mode="max", patience=1, restore_best_weights=True
            )
        ]

    want, _ = check_with(stop, epochs=4)
    assert len(want.result["history"]["loss"]) == 2


def test_csv_logger_writes_what_one_device_writes(tmp_path):
    def drive(model):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.csv"
        logger = callbacks.CSVLogger(path)
        fit(x, y, callbacks=[logger], validation_data=VALIDATION)(model)
        with path.open() as file:
            rows = list(csv.DictReader(file))
        return [{name: float(value) for name, value in row.items()} for row in rows]

    want, _ = check(mlp, compiled(metrics=["mae"]), drive)
    assert len(want.result) == 2


def test_reduce_on_plateau_matches_one_device():
    def callback():
        return [
            callbacks.ReduceLROnPlateau(
                monitor="val_loss", factor=0.5, patience=1, min_delta=10.0
            )
        ]

    want, _ = check_with(callback, validation_data=VALIDATION, epochs=3)
    assert want.result["history"]["learning_rate"][-1] == pytest.approx(0.05)


@pytest.mark.parametrize("swap_on_epoch", [False, True])
def test_swapped_averages_match_one_device(swap_on_epoch):
    """Nothing may follow `fit` here: Keras then leaves a weight and its average
    in one buffer, which the next step donates, on one device too.
    """

    def compile_args():
        optimizer = keras.optimizers.SGD(
            0.1, momentum=0.9, use_ema=True, ema_momentum=0.7
        )
        return {"optimizer": optimizer, "loss": "mse", "metrics": ["mae"]}

    def drive(model):
        swap = callbacks.SwapEMAWeights(swap_on_epoch=swap_on_epoch)
        return fit(x, y, callbacks=[swap], validation_data=VALIDATION)(model)

    want = run_on_one_device(mlp, compile_args, drive)
    got = run_on_replicas(mlp, compile_args, drive)
    assert_same("result", got.result, want.result)
    assert_same("state", got.state, want.state)


def test_terminate_on_nan_stops_at_the_same_batch():
    """The NaN is in the rows of the last replica alone."""
    broken = y.copy()
    broken[15] = np.nan

    def drive(model):
        watch = Watch()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            fit(x, broken, callbacks=[callbacks.TerminateOnNaN(), watch])(model)
        return [seen["batch"] for seen in watch.seen]

    want = run_on_one_device(mlp, compiled(), drive)
    got = run_on_replicas(mlp, compiled(), drive)
    assert got.result == want.result == [0, 1]


def test_tensorboard_writes_and_matches_one_device(tmp_path):
    def callback():
        return [
            callbacks.TensorBoard(
                tmp_path, histogram_freq=1, update_freq=2, write_graph=False
            )
        ]

    check_with(callback, validation_data=VALIDATION)
    assert list(tmp_path.rglob("events.out.tfevents*"))


def test_lambda_callback_and_remote_logs_are_plain_numbers():
    seen = []

    def drive(model):
        def note(epoch, logs):
            seen.append(all(isinstance(value, float) for value in logs.values()))

        callback = callbacks.LambdaCallback(on_epoch_end=note)
        return fit(x, y, callbacks=[callback], validation_data=VALIDATION)(model)

    check(mlp, compiled(metrics=["mae"]), drive)
    assert seen and all(seen)


class Hears(callbacks.Callback):
    """Hears of batches through one method alone."""

    def __init__(self, method):
        super().__init__()
        self.seen = []
        setattr(self, method, lambda batch, logs=None: self.seen.append(batch))


METHODS = [
    f"on_{kind}batch_{side}"
    for kind in ("", "train_", "test_", "predict_")
    for side in ("begin", "end")
]


@pytest.mark.parametrize("method", METHODS)
def test_each_batch_method_is_called_as_on_one_device(method):
    def drive(model):
        hears = Hears(method)
        fit(x, y, epochs=1, validation_data=VALIDATION, callbacks=[hears])(model)
        model.predict(x, batch_size=8, callbacks=[hears], verbose=0)
        return {"seen": hears.seen}

    want, _ = check(mlp, compiled(), drive)
    assert want.result["seen"]


def test_a_method_that_looks_like_the_default_is_called():
    """functools.wraps copies the mark that Keras puts on its own methods."""
    seen = []

    class Wrapped(callbacks.Callback):
        @functools.wraps(callbacks.Callback.on_train_batch_end)
        def on_train_batch_end(self, batch, logs=None):
            seen.append(batch)

    run_on_replicas(mlp, compiled(), fit(x, y, callbacks=[Wrapped()]))
    # Keras calls what bears its mark on several threads, in no order.
    assert sorted(seen) == sorted([0, 1, 2, 3] * 2)


def test_a_step_that_no_callback_hears_of_wakes_no_thread(monkeypatch):
    submit, submitted = ThreadPoolExecutor.submit, []

    def counted(self, function, *arguments):
        submitted.append(function)
        return submit(self, function, *arguments)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", counted)
    run_on_replicas(mlp, compiled(), fit(x, y))
    assert not submitted
    run_on_one_device(mlp, compiled(), fit(x, y))
    assert submitted  # else this is not how Keras does it any more
