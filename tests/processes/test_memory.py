"""The memory benchmark: what split variables save, and what they send."""

import json
import pathlib
import subprocess
import sys

import cluster
import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
DEVICES = 8


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """14 million parameters and Adam on eight devices; compiled, not run."""
    picture = tmp_path_factory.mktemp("memory") / "memory.png"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "memory.py"), "--devices", str(DEVICES)]
        + ["--json", "--plot", str(picture)],
        env=cluster.environment(DEVICES, needs=["matplotlib"], as_users_do=True),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    return {point["way"]: point for point in json.loads(done.stdout)["points"]}


def test_arguments_shrink_by_what_is_split(found):
    whole = found["mirrored"]["argument_bytes"]
    for way, share in (
        ("optimizer", 1 / 3 + 2 / 3 / DEVICES),
        ("gradients", 1 / 3 + 2 / 3 / DEVICES),
        ("parameters", 1 / DEVICES),
    ):
        assert found[way]["argument_bytes"] <= (share + 0.02) * whole, way


def test_temporaries_stay_below_those_of_mirrored_training(found):
    most = found["mirrored"]["temporary_bytes"]
    assert found["gradients"]["temporary_bytes"] < most / 3
    largest = found["parameters"]["largest_layer_bytes"]
    for way in ("optimizer", "parameters"):
        assert found[way]["temporary_bytes"] <= most + largest


@pytest.mark.parametrize("way", ["mirrored", "optimizer", "gradients", "parameters"])
def test_bytes_sent_are_those_of_the_formula(found, way):
    weights = found[way]["parameter_bytes"]
    # XLA's CPU compiler merges the two times that "parameters" puts weights together;
    # where it keeps them apart this is 3 (n - 1) / n.
    formula = 2 * (DEVICES - 1) / DEVICES * weights
    assert found[way]["bytes_sent"] == pytest.approx(formula, rel=1e-3)


def test_gradients_leave_by_one_collective_where_the_slots_alone_are_split(found):
    # It, the loss with what is not split, and four matrices put together.
    assert found["optimizer"]["collectives"] == 1 + 1 + 4
    assert found["gradients"]["collectives"] == 4 + 1 + 4
    assert found["mirrored"]["collectives"] == 1


def test_keras_own_model_parallel_stands_beside_them(found):
    keras_own = found["ModelParallel"]["argument_bytes"]
    assert found["parameters"]["argument_bytes"] < keras_own
