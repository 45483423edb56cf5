"""The command's arguments, its exit codes, and what it refuses and how."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_mirror.command_line import main
from keras_mirror.demo.datasets import load_data
from keras_mirror.demo.settings import DemoError, UsageError
from keras_mirror.demo.timing import CompileClock

ROOT = Path(__file__).parents[2]
FRAMEWORKS = {"keras", "jax", "numpy", "rich", "tensorflow", "torch", "sklearn"}
IMAGES = np.arange(10 * 4, dtype="float32").reshape(10, 2, 2)
LABELS = np.arange(10) % 3


def run_python(code, **environment):
    """Runs code in a new process that looks like the console script."""
    removed = ("XLA_FLAGS", "KERAS_BACKEND", "JAX_NUM_CPU_DEVICES")
    kept = {key: value for key, value in os.environ.items() if key not in removed}
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.argv[0] = 'keras-mirror'\n{code}"],
        cwd=ROOT,
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["demo", "--help"],
        ["devices", "--help"],
        [],
        ["demo", "--devices=0"],
    ],
    ids=" ".join,
)
def test_help_and_wrong_usage_import_no_framework(argv):
    code = (
        "from keras_mirror.command_line import main\n"
        f"main({argv})\n"
        f"print(sorted({FRAMEWORKS} & set(sys.modules)), file=sys.stderr)\n"
        "print('LOADED', *sys.modules)"
    )
    loaded = set(run_python(code).rpartition("LOADED")[2].split())
    assert "keras_mirror.command_line" in loaded
    assert loaded & FRAMEWORKS == set()


def test_python_dash_m_help_imports_no_framework():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "keras_mirror", "demo", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0, done.stderr
    assert "usage: keras-mirror demo" in done.stdout
    assert "argparse" in loaded
    assert loaded & FRAMEWORKS == set()


@pytest.mark.parametrize(
    "argv", [["--help"], ["demo", "--help"], ["devices", "--help"]]
)
def test_help_states_the_exit_codes_on_stdout(argv, capsys):
    assert main(argv) == 0
    printed = capsys.readouterr()
    assert "exit codes: 0 done, 1 the work failed, 2 wrong usage" in printed.out
    assert printed.err == ""


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["required: COMMAND"]),
        (["dmeo"], ["invalid choice: 'dmeo'", "demo"]),
        (["demo", "--devices", "0"], ["--devices", "at least 1", "'0'"]),
        (["demo", "--devices", "two"], ["--devices", "'two'"]),
        (["demo", "--devices", "64"], ["at most 4", "Received: 64", "XLA_FLAGS"]),
        (["demo", "--epochs", "-1"], ["--epochs", "'-1'"]),
        (["demo", "--batch-size", "0"], ["--batch-size", "'0'"]),
        (["demo", "--strategy", "mirored"], ["'mirored'", "Did you mean 'mirrored'?"]),
        (["demo", "--optimizer", "adm"], ["'adm'", "Did you mean 'adam'?"]),
        (["demo", "--data", "digts"], ["'digts'", "Did you mean 'digits'?"]),
        (["demo", "--data", "no/such.npz"], ["'no/such.npz'", "no such file"]),
        (["demo", "--strategy", "one_device", "--devices", "2"], ["one device"]),
        (["devices", "--data", "digits"], ["unrecognized arguments: --data"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_usage_is_exit_code_2_and_one_line(argv, words, capsys):
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1 and printed.err.startswith("keras-mirror")
    for word in words:
        assert word in printed.err


@pytest.mark.parametrize(
    ("argument", "environment", "expected"),
    [
        ("", {}, "jax --xla_force_host_platform_device_count=4"),
        ("devices=2", {}, "jax --xla_force_host_platform_device_count=2"),
        ("devices=2", {"XLA_FLAGS": "--xla_x=1"}, "jax --xla_x=1 --xla_force_host_"),
        (
            "devices=2",
            {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
            "jax --xla_force_host_platform_device_count=8\n",
        ),
        ("devices=2", {"JAX_NUM_CPU_DEVICES": "3"}, "jax None"),
        ("", {"KERAS_BACKEND": "torch"}, "torch --xla_force"),
    ],
)
def test_the_environment_gets_what_the_user_has_not_set(
    argument, environment, expected
):
    code = (
        "import os\nfrom keras_mirror.demo.settings import DemoSettings\n"
        f"DemoSettings({argument}).prepare_environment()\n"
        "print(os.environ['KERAS_BACKEND'], os.environ.get('XLA_FLAGS'))"
    )
    assert run_python(code, **environment).startswith(expected)


def test_devices_are_named_as_keras_names_them(capsys):
    import keras

    assert main(["devices", "--json"]) == 0
    devices = json.loads(capsys.readouterr().out)["devices"]
    assert [d["name"] for d in devices] == keras.distribution.list_devices()
    assert {d["platform"] for d in devices} == {"cpu"}
    fields = {"name", "platform", "kind", "memory_bytes", "worker"}
    assert all(set(d) == fields for d in devices)
    assert main(["devices"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["name", "platform", "kind", "memory"]
    assert [row.split()[0] for row in rows] == [d["name"] for d in devices]


def test_devices_makes_no_virtual_ones():
    code = "from keras_mirror.command_line import main\nmain(['devices', '--json'])"
    printed = run_python(code, JAX_PLATFORMS="cpu")
    assert [d["name"] for d in json.loads(printed)["devices"]] == ["cpu:0"]


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"a": IMAGES}, ["Received: a", "Missing: x, y"]),
        ({"x": IMAGES}, ["Missing: y"]),
        ({"x_train": IMAGES, "y_test": LABELS}, ["Missing: y_train, x_test"]),
        (
            {"x": IMAGES, "y": LABELS[:9]},
            ["same number of rows", "x float32[10, 2, 2]"],
        ),
        ({"x": IMAGES, "y": np.int64(1)}, ["same number of rows"]),
        ({"x": IMAGES[:0], "y": LABELS[:0]}, ["at least one row"]),
        ({"x": IMAGES[:1], "y": LABELS[:1]}, ["at least 2 rows"]),
        ({"x": LABELS, "y": LABELS}, ["shape [rows, ...]"]),
        ({"x": IMAGES.astype(str), "y": LABELS}, ["x must be numbers"]),
        ({"x": IMAGES * np.nan, "y": LABELS}, ["no NaN"]),
        ({"x": IMAGES, "y": LABELS + 0.5}, ["whole numbers"]),
        ({"x": IMAGES, "y": np.eye(10)}, ["argmax"]),
        ({"x": IMAGES, "y": LABELS * 0}, ["at least 2 classes"]),
        (
            dict(x_train=IMAGES, y_train=LABELS, x_test=IMAGES[:, 1:], y_test=LABELS),
            ["x_train [10, 2, 2], x_test [10, 1, 2]"],
        ),
        (
            dict(x_train=IMAGES, y_train=LABELS, x_test=IMAGES, y_test=LABELS[1:]),
            ["x_test and y_test must have the same number of rows"],
        ),
        ({"x": np.array([{}] * 10), "y": LABELS}, ["cannot be read"]),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_what_it_holds(
    arrays, words, tmp_path
):
    path = tmp_path / "own.npz"
    np.savez(path, **arrays)
    with pytest.raises(UsageError) as refused:
        load_data(str(path))
    for word in [str(path), *words]:
        assert word in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"no arrays", b"PK\x03\x04 cut short"])
def test_a_file_that_is_no_npz_is_refused(content, tmp_path):
    path = tmp_path / "own.npz"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"cannot be read as an \.npz file"):
        load_data(str(path))


def test_a_bare_array_is_refused(tmp_path):
    np.save(tmp_path / "own.npy", IMAGES)
    with pytest.raises(UsageError, match="one bare array"):
        load_data(str(tmp_path / "own.npy"))


def test_own_arrays_are_scaled_split_and_their_classes_numbered(tmp_path):
    names = np.array(["cat", "dog", "eel"])[LABELS]
    np.savez(tmp_path / "own.npz", x=IMAGES, y=names)
    data = load_data(str(tmp_path / "own.npz"))
    assert (len(data.x_train), len(data.x_test), data.num_classes) == (8, 2, 3)
    assert data.x_train.dtype == np.float32 and data.x_train.shape[1:] == (2, 2)
    assert data.x_train.min() == 0 and data.x_train.max() == 1
    # Undo the scaling to find each row's place in the file: no row is lost,
    # none comes twice, and each still has its own label.
    rows = np.concatenate([data.x_train, data.x_test])
    first = rows[:, 0, 0]
    place = np.argsort(np.argsort(first))
    assert sorted(place) == list(range(10))
    labels = np.concatenate([data.y_train, data.y_test])
    assert np.array_equal(labels, LABELS[place])


def test_bytes_are_scaled_by_their_range_and_not_by_the_data(tmp_path):
    x = np.full((4, 2, 2), 51, "uint8")
    arrays: dict[str, Any] = dict(
        x_train=x, y_train=[5, 7, 5, 7], x_test=x, y_test=[[7], [5], [7], [7]]
    )
    np.savez(tmp_path / "own.npz", **arrays)
    data = load_data(str(tmp_path / "own.npz"))
    assert np.allclose(data.x_train, 0.2) and np.allclose(data.x_test, 0.2)
    assert data.y_train.tolist() == [0, 1, 0, 1]
    assert data.y_test.tolist() == [1, 0, 1, 1]


def test_missing_scikit_learn_is_said_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DemoError, match="python -m pip install scikit-learn"):
        load_data("digits")


def test_compile_clock_counts_nested_traces_once_and_cached_calls_not_at_all():
    import jax
    import jax.numpy as jnp

    @jax.jit
    def inner(x):
        time.sleep(0.2)
        return x * 2

    @jax.jit
    def outer(x):
        return inner(x) + 1

    x = jnp.ones(3)
    with CompileClock() as clock:
        started = time.time()
        outer(x)
        passed = time.time() - started
        once = clock.seconds()
        outer(x)
        assert clock.seconds() == once
    # Both traces last 0.2 s: added up they would be more than the time passed.
    assert 0.2 <= once <= passed
    inner(x + x[0])
    jax.jit(lambda y: y * 3)(x)
    assert clock.seconds() == once
