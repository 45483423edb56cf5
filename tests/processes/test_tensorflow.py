"""The tests of `tests/jax` that hold on the TensorFlow backend too, run there."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parents[1]
# By file: what is JAX's alone, or differs, and why.
FILES = {
    "test_losses.py": [],
    # Their slots have other names, as they are made before the first step.
    "test_optimizers.py": ["Adafactor", "Nadam", "ScheduleFreeAdamW"],
    "test_dropout.py": [],
    "test_recurrent.py": [],
    "test_layers.py": [],
    # Looks at JAX arrays.
    "test_batch_norm.py": ["equal_on_all_devices"],
    # With several outputs Keras on TensorFlow logs each output's loss as the mean over
    # batches, not rows; and it warns of weights without a gradient.
    "test_models.py": ["loss_weights", "of_each_output", "each_output_with"]
    + ["unused_weights", "without_a_loss", "subclassed_unbuilt"],
}


@pytest.mark.parametrize("file", FILES)
def test_one_device_is_matched_on_tensorflow(file):
    left_out = " or ".join(FILES[file])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        + ["-p", "no:xdist", str(TESTS / "jax" / file)]
        + (["-k", f"not ({left_out})"] if left_out else []),
        env=os.environ | {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.fixture(scope="module")
def found():
    done = subprocess.run(
        [sys.executable, str(TESTS / "processes" / "tensorflow_program.py")],
        env=os.environ | {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_strategy_matches_one_device_on_tensorflow(found):
    assert len(found["off"]) == 12 and max(found["off"].values()) < 1e-5, found["off"]


def test_what_mixes_rows_runs_whole_on_tensorflow(found):
    for name, why in found["whole"].items():
        if name.endswith("one_device"):
            assert why == "there is one replica"
        elif name.startswith("plain"):
            assert why is None
        elif name.startswith("own"):
            assert why == "the model has a step of its own"
        else:
            assert "depend on other rows" in why, (name, why)


def test_variables_lie_on_the_storage_device_on_tensorflow(found):
    assert found["places"] == ["cpu:3"]


def test_what_tensorflow_does_not_do_yet_is_refused(found):
    assert len(found["refused"]) == 4
    assert all("KERAS_BACKEND=jax" in said for said in found["refused"])
