"""What a step over several workers sends, seen in the program that each compiles."""

import cluster
import numpy as np
import pytest
import training
from parity import assert_same


@pytest.fixture(scope="module", params=[2, 4], ids=["two_by_two", "two_by_four"])
def found(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("traffic")
    devices = request.param
    options = {"workers": 2, "devices": devices}
    results = cluster.results("traffic_worker.py", folder, **options)
    for result in results:
        assert result["mesh"] == {"worker": 2, "device": devices}
    return results


def devices(found):
    return found[0]["mesh"]["device"]


def ring(replicas):
    """Bytes that each sends per byte of an all-reduce."""
    return 2 * (replicas - 1) / replicas


def test_workers_compile_steps_that_send_alike(found):
    for size in ("small", "large"):
        assert found[0][size] == found[1][size]
        assert found[0][size]["view"] == "replica"


def test_a_large_step_has_one_all_reduce(found):
    large, replicas = found[0]["large"], 2 * devices(found)
    assert large["operations"] == ["all-reduce"] and large["collectives"] == 1
    metrics = 4 * 2  # two sums of the metrics travel along
    assert large["bytes_sent"] == round(
        ring(replicas) * (large["vector_bytes"] + metrics)
    )


def test_a_small_step_goes_in_two_levels_where_workers_have_four_devices(found):
    small, replicas = found[0]["small"], 2 * devices(found)
    metrics = 4 * 2
    if devices(found) < 4:
        assert small["operations"] == ["all-reduce"]
        sent = ring(replicas) * (small["vector_bytes"] + metrics)
    else:
        # Inside a worker, between workers, and the sums of the metrics.
        assert small["operations"] == ["all-reduce"] * 3
        levels = ring(devices(found)) + ring(2)
        sent = levels * small["vector_bytes"] + ring(replicas) * metrics
    assert small["bytes_sent"] == round(sent)


def test_the_axis_of_the_context_spans_all_replicas(found):
    everyone = list(range(2 * devices(found)))
    for result in found:
        inside = result["inside"]
        assert [int(value) for value in inside["id"]] == everyone
        assert [int(value) for value in inside["sum"]] == [sum(everyone)] * len(
            everyone
        )
        assert {int(value) for value in inside["most"]} == {everyone[-1]}
        for gathered in inside["gathered"]:
            np.testing.assert_array_equal(gathered, everyone)


@pytest.mark.filterwarnings("ignore:.shuffle=True. was passed:UserWarning")
def test_training_matches_one_device(found):
    assert_same("worker", found[1]["trained"], found[0]["trained"], 0)
    assert_same("workers", found[0]["trained"], training.run("data: shuffled"))
