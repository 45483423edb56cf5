"""`km.launch(function)` from a script."""

import json
import subprocess
import sys
import threading

import cluster
import pytest
import training
from parity import assert_same

import keras_mirror as km


def run(name):
    """What the script prints; the workers' output goes to stderr."""
    done = subprocess.run(
        [sys.executable, str(cluster.HERE / "called.py"), name],
        env=cluster.environment(1),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_function_returns_what_each_worker_found_by_rank():
    found = run("found")
    assert [worker["place"] for worker in found] == [[0, 2], [1, 2]]
    assert [worker["scaled"] for worker in found] == [3, 13]
    assert found[1]["history"] == found[0]["history"]
    want = training.run("data: arrays")["history"]
    assert_same("history", found[0]["history"], want)


def test_a_function_that_raises_gives_the_workers_traceback():
    said, code = run("fails")
    assert code == 1
    assert "worker 1 failed first: host" in said and "exit code 1" in said
    assert "in fails" in said and "ValueError: no such shard" in said


@pytest.mark.parametrize(
    ("fn", "options", "text"),
    [
        ("train.py", {}, "`fn` must be callable. Received: 'train.py'"),
        (print, {"workers": 0}, "workers must be .* at least 1. Received: 0"),
        (print, {"log_dir": 3}, "log_dir must be a path, or None. Received: 3"),
        (print, {"kwargs": []}, "`kwargs` must be a mapping"),
        (print, {"args": [threading.Lock()]}, r"`args` is sent .*lock.*TypeError"),
    ],
)
def test_what_cannot_be_launched_is_refused(fn, options, text):
    with pytest.raises(km.errors.LaunchUsageError, match=text):
        km.launch(fn, **options)
