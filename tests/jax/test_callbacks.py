"""Callbacks see global values, and may read and save the model at any batch."""

import contextlib
import csv
import warnings

import keras
import numpy as np
import pytest
from keras import callbacks
from parity import (
    assert_same,
    check,
    compiled,
    device_count,
    fit,
    mirrored,
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


class SaveEachBatch(callbacks.Callback):
    def __init__(self, folder):
        super().__init__()
        self.folder, self.seen = folder, []

    def on_train_batch_end(self, batch, logs=None):
        path = self.folder / f"{len(self.seen)}.keras"
        self.model.save(path)
        self.seen.append(keras.models.load_model(path).get_weights())


def test_model_saved_in_a_batch_callback_matches_one_device(tmp_path):
    want, _ = check_with(lambda: [SaveEachBatch(tmp_path)])
    assert not np.array_equal(want.result["seen"][0][0][0], want.start[0])


# Keras' own -----------------------------------------------------------------


def saved(folder):
    """The weights in each file of a folder, by the file's name."""
    found = {}
    for path in sorted(folder.iterdir()):
        model = mlp()
        if path.suffix == ".keras":
            model = keras.models.load_model(path)
        else:
            model.load_weights(path)
        found[path.name] = model.get_weights()
    return found


CHECKPOINTS = {
    "each_epoch": ("{epoch}.keras", {}),
    "every_3_batches": ("{epoch}-{batch}.keras", {"save_freq": 3}),
    "best_weights": (
        "{epoch}.weights.h5",
        {"save_weights_only": True, "save_best_only": True, "monitor": "val_mae"},
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_model_checkpoint_matches_one_device(name, tmp_path):
    pattern, options = CHECKPOINTS[name]

    def drive(model):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        callback = callbacks.ModelCheckpoint(folder / pattern, **options)
        train = fit(x, y, callbacks=[callback], validation_data=VALIDATION)
        return train(model) | {"saved": saved(folder)}

    want, _ = check(mlp, compiled(metrics=["mae"]), drive)
    assert want.result["saved"]


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


class Interrupt(callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise InterruptedError("the machine went away")


def interrupted_and_resumed(folder):
    def drive(model):
        backup = lambda: callbacks.BackupAndRestore(folder)  # noqa: E731
        with pytest.raises(InterruptedError):
            fit(x, y, epochs=4, callbacks=[backup(), Interrupt()])(model)
        again = mlp()
        again.compile(**compiled()())
        resumed = fit(x, y, epochs=4, callbacks=[backup()])(again)
        return {
            "history": resumed["history"],
            "weights": again.get_weights(),
            "left": model.get_weights(),
        }

    return drive


def test_backup_and_restore_resumes_as_on_one_device(tmp_path):
    want = run_on_one_device(mlp, compiled(), interrupted_and_resumed(tmp_path / "one"))
    got = run_on_replicas(mlp, compiled(), interrupted_and_resumed(tmp_path / "four"))
    unbroken = run_on_one_device(mlp, compiled(), fit(x, y, epochs=4))
    assert_same("result", got.result, want.result)
    assert_same("weights", got.result["weights"], unbroken.model.get_weights())
    assert len(got.result["history"]["loss"]) == 2


def test_backup_resumes_on_the_same_model(tmp_path):
    """The model that was interrupted is itself still usable."""

    def drive(model):
        backup = lambda: callbacks.BackupAndRestore(tmp_path / "same")  # noqa: E731
        with pytest.raises(InterruptedError):
            fit(x, y, epochs=4, callbacks=[backup(), Interrupt()])(model)
        return fit(x, y, epochs=4, callbacks=[backup()])(model)

    check(mlp, compiled(), drive)


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


def functional():
    """Keras reads an Orbax checkpoint by path; a Sequential's paths change."""
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


# Keras asks Orbax for arrays without saying where they shall lie.
@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
@pytest.mark.parametrize("save_freq", ["epoch", 4])
def test_orbax_checkpoint_resumes_on_one_device_and_on_replicas(save_freq, tmp_path):
    """An epoch is 4 batches: both frequencies leave the state at its end."""

    def train(model):
        callback = callbacks.OrbaxCheckpoint(
            str(tmp_path), save_freq=save_freq, save_on_background=False
        )
        return fit(x, y, callbacks=[callback], epochs=1)(model)

    run_on_replicas(functional, compiled(), train)
    unbroken = run_on_one_device(functional, compiled(), fit(x, y, epochs=2))
    for scope, devices in ((contextlib.nullcontext(), 1), (mirrored().scope(), 4)):
        with scope:
            model = keras.models.load_model(tmp_path)
            fit(x, y, epochs=1)(model)
        assert device_count(model) == devices
        assert_same("weights", model.get_weights(), unbroken.model.get_weights())
