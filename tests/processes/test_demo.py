"""`keras-mirror demo` as users start it: in a process of its own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 180
RUN_KEYS = {
    "final_loss",
    "accuracy",
    "val_accuracy",
    "examples_per_second",
    "compile_seconds",
}


def run_demo(tmp_path, *arguments, **environment):
    """Runs the demo; returns its exit code, stdout and stderr."""
    # What conftest sets for the other tests is what the demo must find by itself.
    removed = ("XLA_FLAGS", "KERAS_BACKEND", "COLUMNS")
    kept = {key: value for key, value in os.environ.items() if key not in removed}
    command = [sys.executable, "-m", "keras_mirror", "demo", *arguments]
    out, err = tmp_path / "stdout.log", tmp_path / "stderr.log"
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=kept | {"JAX_PLATFORMS": "cpu"} | environment,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise AssertionError(
                f"deadline passed; stderr: {err.read_text()}"
            ) from None
    return code, out.read_text(), err.read_text()


def test_demo_trains_replicas_as_one_device_trains(tmp_path):
    code, out, err = run_demo(
        tmp_path, "--devices=4", "--optimizer=sgd", "--epochs=2", "--json"
    )
    assert code == 0, err
    result = json.loads(out)
    assert set(result) == {
        "num_replicas",
        "strategy",
        "one_device",
        "replicas",
        "max_weight_difference",
        "collectives_per_step",
        "bytes_per_step",
    }
    one, many = result["one_device"], result["replicas"]
    assert set(one) == set(many) == RUN_KEYS
    numbers = [*one.values(), *many.values(), result["max_weight_difference"]]
    assert all(type(number) is float for number in numbers), result
    assert (result["num_replicas"], result["strategy"]) == (4, "mirrored")
    assert result["max_weight_difference"] < 1e-5
    assert abs(one["final_loss"] - many["final_loss"]) < 1e-5
    assert one["accuracy"] == many["accuracy"] > 0.3
    assert one["val_accuracy"] == many["val_accuracy"] > 0.3
    assert min(one["examples_per_second"], many["examples_per_second"]) > 0
    assert min(one["compile_seconds"], many["compile_seconds"]) > 0
    # The gradients of 64 x 128 + 128 + 128 x 10 + 10 weights cross in every step:
    # 2 x 3/4 of their bytes in a ring of four, and little besides.
    gradient_bytes = 4 * (64 * 128 + 128 + 128 * 10 + 10)
    assert 1 <= result["collectives_per_step"] <= 2
    assert 1.5 * gradient_bytes <= result["bytes_per_step"] < 1.6 * gradient_bytes
    # The mesh and the progress are on stderr.
    assert "cpu:3" in err and "rows 24-31" in err and "full copy" in err
    assert "one device: epoch 2/2" in err and "4 replicas: epoch 2/2" in err


def test_demo_prints_a_table_for_own_data_and_a_plain_terminal(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.random((50, 5, 5)), rng.integers(0, 3, 50)
    np.savez(tmp_path / "own.npz", x=x, y=y)
    data = f"--data={tmp_path / 'own.npz'}"
    code, out, err = run_demo(
        tmp_path,
        data,
        "--devices=3",
        "--epochs=1",
        "--batch-size=16",
        PYTHONIOENCODING="ascii",
        KERAS_MIRROR_STRATEGY="mirrored",
    )
    assert code == 0, err
    for label in ("one device", "3 replicas", "examples/s", "collectives per step"):
        assert label in out
    assert "--optimizer sgd" in " ".join(out.split())
    # 16 rows are not divided by 3 devices: 6, 6 and 4.
    assert "+- cpu:2" in err and "rows 12-15" in err
    assert out.isascii() and err.isascii()


def test_demo_says_that_mnist_cannot_be_had(tmp_path):
    nowhere = "http://127.0.0.1:9"
    code, out, err = run_demo(
        tmp_path,
        "--data=mnist",
        KERAS_HOME=str(tmp_path),
        HTTPS_PROXY=nowhere,
        https_proxy=nowhere,
        no_proxy="",
        NO_PROXY="",
    )
    last = err.splitlines()[-1]
    assert (code, out) == (1, ""), err
    assert "could not be downloaded" in last and "--data digits" in last
    assert "Traceback" not in err
