"""The scaling benchmark: what it counts, what it says, and its alpha-beta model."""

import importlib
import json
import pathlib
import subprocess
import sys

import cluster
import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    return tmp_path_factory.mktemp("scaling") / "scaling.png"


@pytest.fixture(scope="module")
def found(picture):
    """One small run of everything."""
    options = ["--devices", "2", "--processes", "1x1,2x1", "--measure"]
    options += ["--rounds", "2", "--steps", "2", "--latency", "7", "--json"]
    script = str(BENCHMARKS / "scaling.py")
    done = subprocess.run(
        [sys.executable, script, *options, "--plot", str(picture)],
        env=cluster.environment(2, needs=["matplotlib"]),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_replicas_send_alike_in_one_process_and_in_two(found):
    virtual, alone, processes = found["points"]
    assert alone["collectives"] == 0 and alone["bytes_sent"] == 0
    for point in (virtual, processes):
        assert point["devices"] == 2 and point["collectives"] == 1
        # The loss and the metric's sum, beside the gradients.
        assert point["bytes_sent"] == 4 * (269_322 + 2)


def test_the_json_says_what_was_measured_and_from_what_was_predicted(found, picture):
    assert found["cores"] >= 1 and found["rows_per_replica"] == 64
    assert found["latency"] == 7 and found["sources"] == {
        "step_ms": "measured",
        "bandwidth": "measured",
        "latency": "given",
    }
    virtual, alone, processes = found["points"]
    assert [p["layout"] for p in found["points"]] == [None, "1x1", "2x1"]
    assert virtual["measured_milliseconds"] == []
    assert alone["measured_ratios"] == [1, 1] and alone["efficiency"] == 1
    for time, ratio, base in zip(
        processes["measured_milliseconds"],
        processes["measured_ratios"],
        alone["measured_milliseconds"],
        strict=True,
    ):
        assert time > 0 and ratio == pytest.approx(time / base)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_two_pings_give_back_the_latency_and_the_bandwidth(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    scaling = importlib.import_module("scaling")
    replicas, latency, bandwidth = 4, 5e-6, 12.5e9
    small, large = (
        2 * (replicas - 1) * latency + 2 * (replicas - 1) / replicas * size / bandwidth
        for size in scaling.PING_BYTES
    )
    found = scaling.alpha_beta(small, large, replicas)
    assert found == pytest.approx({"latency": 5, "bandwidth": 12.5})
