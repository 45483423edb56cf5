"""Files written after training under a strategy, read without keras_mirror."""

import json
import os
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
from keras import layers
from parity import (
    assert_same,
    device_count,
    fit,
    mirrored,
    numbers,
    run_on_one_device,
    run_on_replicas,
)

x, y = numbers()
TIMEOUT_SECONDS = 180


def network():
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="tanh"),
            layers.LayerNormalization(),
            layers.Dense(1),
        ]
    )


def adam():
    """Adam's slots and its step count all matter to what follows."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.02, 2, 0.9)
    optimizer = keras.optimizers.Adam(schedule, amsgrad=True)
    return {"optimizer": optimizer, "loss": "mse", "metrics": ["mae"]}


# Continues in a process that cannot import keras_mirror; the arrays go by file.
CONTINUE = """
import json, os, sys
sys.modules["keras_mirror"] = None
folder = sys.argv[1]
import keras
import numpy as np

data = np.load(os.path.join(folder, "data.npz"))
x, y = data["x"], data["y"]
{load}
before = model.predict(x, verbose=0)
history = model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0).history
np.savez(os.path.join(folder, "weights.npz"), before, *model.get_weights())
json.dump(history, open(os.path.join(folder, "history.json"), "w"))
"""
LOAD_MODEL = 'model = keras.models.load_model(os.path.join(folder, "m.keras"))'
LOAD_WEIGHTS = """
model = keras.Sequential.from_config(json.load(open(os.path.join(folder, "c.json"))))
model.compile(**keras.saving.deserialize_keras_object(
    json.load(open(os.path.join(folder, "compile.json")))
))
model.optimizer.build(model.trainable_variables)
model.load_weights(os.path.join(folder, "m.weights.h5"))
"""
LOAD_EXPORT = """
import os, sys
sys.modules["keras_mirror"] = None
folder = sys.argv[1]
import numpy as np
import tensorflow as tf

served = tf.saved_model.load(os.path.join(folder, "export"))
x = np.load(os.path.join(folder, "data.npz"))["x"]
np.savez(os.path.join(folder, "served.npz"), served.serve(x), served.serve(x[:3]))
"""


def run_without_keras_mirror(program, folder):
    np.savez(folder / "data.npz", x=x, y=y)
    environment = {k: v for k, v in os.environ.items() if "KERAS_MIRROR" not in k}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(folder)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        env=environment,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def written_after_training(folder, **strategy_options):
    """Two of three epochs under replicas, then every kind of file."""

    def drive(model):
        result = fit(x, y)(model)
        model.save(folder / "m.keras")
        model.save_weights(folder / "m.weights.h5")
        (folder / "c.json").write_text(json.dumps(model.get_config()))
        compiled = keras.saving.serialize_keras_object(adam())
        (folder / "compile.json").write_text(json.dumps(compiled))
        result["predict"] = model.predict(x, verbose=0)
        return result

    got = run_on_replicas(network, adam, drive, **strategy_options)
    assert device_count(got.model) == 4
    return got


@pytest.fixture(scope="module")
def unbroken():
    return run_on_one_device(network, adam, fit(x, y, epochs=3))


@pytest.mark.parametrize("load", [LOAD_MODEL, LOAD_WEIGHTS], ids=["keras", "h5"])
def test_file_continues_in_plain_keras(load, unbroken, tmp_path):
    got = written_after_training(tmp_path)
    run_without_keras_mirror(CONTINUE.format(load=load), tmp_path)
    with np.load(tmp_path / "weights.npz") as found:
        before, *weights = (found[name] for name in found.files)
    history = json.loads((tmp_path / "history.json").read_text())
    assert_same("before", before, got.result["predict"])
    assert_same("weights", weights, unbroken.model.get_weights())
    want = {name: values[2:] for name, values in unbroken.result["history"].items()}
    assert_same("history", history, want)


@pytest.mark.parametrize("kind", ["keras", "h5"])
@pytest.mark.parametrize("replicas", [2, 4])
def test_file_continues_under_replicas(kind, replicas, unbroken, tmp_path):
    written_after_training(tmp_path)
    with mirrored(replicas).scope():
        if kind == "keras":
            model = keras.models.load_model(tmp_path / "m.keras")
        else:
            model = network()
            model.compile(**adam())
            model.optimizer.build(model.trainable_variables)
            model.load_weights(tmp_path / "m.weights.h5")
    history = fit(x, y, epochs=1)(model)["history"]
    assert device_count(model) == replicas
    assert_same("weights", model.get_weights(), unbroken.model.get_weights())
    want = {name: values[2:] for name, values in unbroken.result["history"].items()}
    assert_same("history", history, want)
    assert int(model.optimizer.iterations) == 12


def test_file_of_one_device_continues_under_replicas(unbroken, tmp_path):
    plain = run_on_one_device(network, adam, fit(x, y))
    plain.model.save(tmp_path / "m.keras")
    with mirrored().scope():
        model = keras.models.load_model(tmp_path / "m.keras")
    fit(x, y, epochs=1)(model)
    assert device_count(model) == 4
    assert_same("weights", model.get_weights(), unbroken.model.get_weights())


def test_file_names_nothing_of_keras_mirror(tmp_path):
    got = written_after_training(tmp_path)
    for config in (got.model.to_json(), json.dumps(got.model.get_compile_config())):
        assert "keras_mirror" not in config
    plain = run_on_one_device(network, adam, fit(x, y))
    assert got.model.get_compile_config() == plain.model.get_compile_config()


def test_export_serves_in_plain_tensorflow(tmp_path):
    got = written_after_training(tmp_path)
    got.model.export(tmp_path / "export", verbose=False)
    run_without_keras_mirror(LOAD_EXPORT, tmp_path)
    with np.load(tmp_path / "served.npz") as served:
        assert_same("all rows", served["arr_0"], got.result["predict"])
        assert_same("three rows", served["arr_1"], got.result["predict"][:3])
    fit(x, y, epochs=1)(got.model)
    assert device_count(got.model) == 4, "the export moved the model"
