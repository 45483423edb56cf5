"""ShardedCheckpoint: parts saved from where they lie, read wherever they are wanted."""

import collections
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import threading

import jax
import keras
import numpy as np
import pytest
from parity import assert_same, compile_with, fresh, numbers, train_on_numbers

import keras_mirror as km
from keras_mirror import errors

# Where reading has failed, tensorstore tells an event loop that Orbax has closed.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. None:pytest.PytestUnraisableExceptionWarning"
)
LEAST = 8
STRATEGIES = {
    "parameters": lambda: km.ParameterServerStrategy(
        shard="parameters", min_shard_elements=LEAST
    ),
    "optimizer": lambda: km.ParameterServerStrategy(min_shard_elements=LEAST),
    "two devices": lambda: km.ParameterServerStrategy(
        shard="parameters", min_shard_elements=LEAST, devices=["cpu:1", "cpu:2"]
    ),
    "mirrored": km.MirroredStrategy,
    "central_storage": km.CentralStorageStrategy,
    "one_device": lambda: "one_device",
}


def fit(model, epochs=1, **options):
    x, y = numbers()
    return model.fit(
        x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, **options
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the weights after one and two epochs, and those after a third."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model = compile_with(fresh(), distribution=STRATEGIES["parameters"]())
    fit(model, epochs=2, callbacks=[km.ShardedCheckpoint(folder)])
    at_end = model.get_weights()
    fit(model)
    return folder, at_end, model.get_weights()


@pytest.mark.parametrize("name", STRATEGIES)
def test_any_strategy_goes_on_from_a_checkpoint(saved, name):
    folder, at_end, later = saved
    model = compile_with(fresh(), distribution=STRATEGIES[name]())
    assert km.ShardedCheckpoint(folder).restore(model) == 8
    assert_same("restored", model.get_weights(), at_end, 0)
    fit(model)
    assert_same("later", model.get_weights(), later)


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_any_strategy_saves_one_device_reads(name, tmp_path):
    model = compile_with(fresh(), distribution=STRATEGIES[name]())
    saving = km.ShardedCheckpoint(tmp_path, every_steps=3, max_to_keep=2)
    fit(model, epochs=2, callbacks=[saving])  # steps 3 and 6 of 8
    plain = compile_with(fresh())
    saving = km.ShardedCheckpoint(tmp_path)
    assert saving.restore(plain) == 6
    saving.save(plain)  # again, from where it was read
    saving.close()
    want = compile_with(fresh())
    x, y = numbers()
    for step in range(6):
        rows = slice(step % 4 * 8, step % 4 * 8 + 8)
        want.train_on_batch(x[rows], y[rows])
    assert_same("weights", plain.get_weights(), want.get_weights())
    slots = [np.asarray(v) for v in plain.optimizer.variables]
    assert_same("slots", slots, [np.asarray(v) for v in want.optimizer.variables])


def test_each_device_writes_its_own_part(saved):
    folder, _, _ = saved
    (path,) = (folder / "8").rglob("array_metadatas/process_0")
    arrays = json.loads(path.read_text())["array_metadatas"]
    written = {
        array["array_metadata"]["param_name"]: array["array_metadata"]["write_shape"]
        for array in arrays
    }
    assert written["trainable_00000"] == [6, 2]  # of [6, 8]
    assert written["optimizer_00002"] == [6, 2]
    assert written["trainable_00003"] == [1]


def held():
    """Bytes of arrays on each device; a buffer counts once."""
    found = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            key = shard.device, shard.data.unsafe_buffer_pointer()
            found[key] = shard.data.nbytes
    total = collections.Counter()
    for (device, _), size in found.items():
        total[device] += size
    return total


def most_held(function):
    """Bytes of arrays that a device has at any time in a call, beyond those before.

    Looked at whenever JAX's Python code has done something with an array.
    """
    returns, before, most = itertools.count(), held(), 0

    def look(frame, event, _):
        nonlocal most
        is_jax = frame.f_code.co_filename.endswith(("_src/array.py", "_src/api.py"))
        if is_jax and event == "return" and next(returns) % 5 == 0:
            sys.setprofile(None)
            most = max(most, *(held() - before).values(), 0)
            sys.setprofile(look)

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return most


@pytest.mark.parametrize("name", ["parameters", "optimizer"])
def test_saving_holds_no_more_than_one_variable_beyond_the_parts(name, tmp_path):
    layers = [keras.Input((6,)), *(keras.layers.Dense(64) for _ in range(4))]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile("adam", "mse", distribution=STRATEGIES[name]())
    fit(model)
    gc.collect()
    one = 64 * 64 * 4
    saving = km.ShardedCheckpoint(tmp_path)
    assert most_held(lambda: (saving.save(model), saving.close())) <= one
    assert most_held(lambda: model.save(tmp_path / "model.keras")) <= one
    assert most_held(lambda: model.save_weights(tmp_path / "a.weights.h5")) <= one
    first, kept = jax.devices()[0], []
    move = lambda v: kept.append(jax.device_put(np.asarray(v), first))  # noqa: E731
    # It would have been seen.
    assert most_held(lambda: [*map(move, model.optimizer.variables)]) > 2 * one


def test_checkpoints_that_are_not_there_or_of_others_are_refused(saved, tmp_path):
    folder, _, _ = saved
    model = compile_with(fresh())
    before = model.get_weights()
    with pytest.raises(errors.CheckpointError, match="no checkpoint of step 5.*4, 8"):
        km.ShardedCheckpoint(folder).restore(model, step=5)
    with pytest.raises(errors.CheckpointError, match="Its steps: none"):
        km.ShardedCheckpoint(tmp_path).restore(model)
    other = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    other.compile("sgd", "mse")
    with pytest.raises(errors.CheckpointError, match="where the model has"):
        km.ShardedCheckpoint(folder).restore(other)
    assert_same("weights", model.get_weights(), before, 0)
    for options in ({"every_steps": 0}, {"max_to_keep": None}, {"every_steps": True}):
        with pytest.raises(errors.OptionValueError):
            km.ShardedCheckpoint(folder, **options)


def test_one_of_another_optimizer_or_dtype_is_refused(saved):
    folder, _, _ = saved  # trained by SGD with momentum
    for optimizer in (keras.optimizers.RMSprop(momentum=0.0), "lion"):
        model = fresh()
        model.compile(optimizer, "mse")
        with pytest.raises(errors.CheckpointError, match="'optimizer': 'SGD'"):
            km.ShardedCheckpoint(folder).restore(model)
    keras.config.set_dtype_policy("float16")
    half = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
    )
    keras.config.set_dtype_policy("float32")
    half = compile_with(half, auto_scale_loss=False)
    with pytest.raises(errors.CheckpointError, match="float32"):
        km.ShardedCheckpoint(folder).restore(half)


def test_the_newest_is_what_was_saved_last(tmp_path):
    old, new = compile_with(fresh()), compile_with(fresh())
    fit(old, epochs=3, callbacks=[km.ShardedCheckpoint(tmp_path)])
    fit(new, callbacks=[km.ShardedCheckpoint(tmp_path)])
    model = compile_with(fresh())
    assert km.ShardedCheckpoint(tmp_path).restore(model) == 4
    assert_same("weights", model.get_weights(), new.get_weights(), 0)


def test_a_fit_that_fails_leaves_what_it_saved(tmp_path):
    def fail(batch, logs):
        if batch == 2:
            raise RuntimeError("stop here")

    saving = km.ShardedCheckpoint(tmp_path / "a", every_steps=1)
    failing = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
    with pytest.raises(RuntimeError, match="stop here"):
        fit(compile_with(fresh()), callbacks=[saving, failing])
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert {"1", "2", "3"} == {name for name in names if name.isdigit()}
    assert not any("tmp" in name for name in names), names


# Orbax leaves tasks behind in the loop that it closes.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_damaged_files_are_said_to_be(saved, tmp_path):
    model = compile_with(fresh())
    saving = km.ShardedCheckpoint(tmp_path)
    saving.save(model)
    assert saving.restore(model) == 0  # with the same object, while it is open
    saving.close()
    for path in (tmp_path / "0").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:10])
    before = model.get_weights()
    with pytest.raises(errors.CheckpointError, match="damaged files of step 0"):
        km.ShardedCheckpoint(tmp_path).restore(model)
    assert_same("weights", model.get_weights(), before, 0)


def test_what_is_no_folder_step_or_ready_model_is_refused(saved, tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", "", 3):
        with pytest.raises(errors.OptionKindError, match="directory"):
            km.ShardedCheckpoint(folder)
    with pytest.raises(errors.OptionKindError, match="is_asynchronous"):
        km.ShardedCheckpoint(tmp_path, is_asynchronous="no")
    with pytest.raises(errors.CheckpointError, match="no such folder"):
        km.ShardedCheckpoint(tmp_path / "none").restore(compile_with(fresh()))
    assert not (tmp_path / "none").exists()
    saving = km.ShardedCheckpoint(saved[0])
    for step in ("4", True):
        with pytest.raises(errors.OptionKindError, match="step"):
            saving.restore(compile_with(fresh()), step)
    unbuilt = compile_with(keras.Sequential([keras.layers.Dense(1)]))
    for model, lacks in ((fresh(), "compiled"), (unbuilt, "built"), ("x", "compiled")):
        for call in (saving.restore, saving.save):
            with pytest.raises(errors.ModelNotReadyError, match=f"that is {lacks}"):
                call(model)


UNFINISHED = """
import sys
sys.path[:0] = {path!r}
from parity import compile_with, fresh, numbers
import keras_mirror as km
model = compile_with(fresh())
km.ShardedCheckpoint({folder!r} + "/whole").save(model)
x, y = numbers()
saving = km.ShardedCheckpoint({folder!r} + "/lost")
import os, shutil
class Lose(type(saving)):
    def on_epoch_begin(self, epoch, logs=None):
        shutil.rmtree(self.directory)
        open(self.directory, "w").close()
try:
    model.fit(x, y, verbose=0, callbacks=[Lose({folder!r} + "/lost")])
except Exception as error:
    print("failed:", type(error).__name__)
"""


def test_a_process_ends_with_its_files_written_also_where_saving_failed(tmp_path):
    code = UNFINISHED.format(path=sys.path, folder=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0 and "failed:" in done.stdout, done.stderr[-3000:]
    assert km.ShardedCheckpoint(tmp_path / "whole").restore(compile_with(fresh())) == 0


KILLED = """
import os, signal, sys
sys.path[:0] = {path!r}
from parity import compile_with, fresh, numbers
import keras_mirror as km
model = compile_with(fresh(), distribution="parameter_server")
x, y = numbers()
saving = km.ShardedCheckpoint({folder!r})
model.fit(x, y, batch_size=8, verbose=0, shuffle=False, callbacks=[saving])
saving.close()
def die(*paths):
    os.kill(os.getpid(), signal.SIGKILL)
os.rename = os.replace = die
import pathlib
pathlib.Path.rename = pathlib.Path.replace = die
model.fit(x, y, batch_size=8, verbose=0, shuffle=False, callbacks=[saving])
saving.close()
"""


def test_a_kill_while_saving_leaves_the_checkpoint_before(tmp_path):
    code = KILLED.format(path=sys.path, folder=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    model = compile_with(fresh())
    assert km.ShardedCheckpoint(tmp_path).restore(model) == 4
    want = compile_with(fresh())
    fit(want)
    assert_same("weights", model.get_weights(), want.get_weights())
    assert train_on_numbers(model)
