"""Checkpoints written while training runs, and training that resumes from them."""

import contextlib

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


class SaveEachBatch(callbacks.Callback):
    def __init__(self, folder):
        super().__init__()
        self.folder, self.seen = folder, []

    def on_train_batch_end(self, batch, logs=None):
        path = self.folder / f"{len(self.seen)}.keras"
        self.model.save(path)
        self.seen.append(keras.models.load_model(path).get_weights())


def test_model_saved_in_a_batch_callback_matches_one_device(tmp_path):
    def drive(model):
        callback = SaveEachBatch(tmp_path)
        return fit(x, y, callbacks=[callback])(model) | {"seen": callback.seen}

    want, _ = check(mlp, compiled(), drive)
    assert not np.array_equal(want.result["seen"][0][0], want.start[0])


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
