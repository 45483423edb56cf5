"""Workers that die, raise, stop or disagree: no hang, no wrong weight."""

import pickle
import re
import signal
import subprocess
import sys
import time

import cluster
import numpy as np
import pytest
import training
from parity import assert_same

WORKERS = {"workers": 2, "devices": 1}
# With "servers" each worker has a part of every weight, and none has it whole.
STRATEGIES = pytest.mark.parametrize("strategy", ["mirrored", "servers"])


def chosen(strategy):
    return {"SERVERS": "1"} if strategy == "servers" else {}


@pytest.fixture
def start(tmp_path):
    """Starts two workers in trouble; none outlives the test."""
    started = []

    def start(*arguments, **more):
        workers = cluster.Cluster(
            "fault_worker.py", tmp_path, arguments=arguments, **WORKERS, more=more
        )
        started.append(workers)
        return workers

    yield start
    for workers in started:
        workers.kill()


def assert_all_fail(workers, seconds=90):
    """Each ends by itself, with an error."""
    codes = workers.wait(seconds)
    assert 0 not in codes and None not in codes, workers.logs()


def results(folder, name, **options):
    options = {"arguments": (name,), "seconds": 120} | WORKERS | options
    return cluster.results("fault_worker.py", folder, **options)


@pytest.mark.parametrize(
    ("victim", "strategy"),
    [(0, "mirrored"), (1, "mirrored"), (1, "servers")],
)
def test_a_killed_worker_ends_the_other(start, victim, strategy):
    workers = start("killed", str(victim), **chosen(strategy))
    assert workers.processes[victim].wait(timeout=90) == -9
    begin = time.monotonic()
    code = workers.wait(40)[1 - victim]
    assert code not in (0, None), workers.logs()
    assert time.monotonic() - begin < 40


@pytest.mark.parametrize("where", ["raises", "raises_outside"])
def test_an_error_on_one_worker_is_named_on_the_other(start, where):
    workers = start(where)
    assert_all_fail(workers)
    assert "worker 1 has failed" in workers.log(0), workers.logs()
    assert "ValueError: the disk is full" in workers.log(0)


@pytest.mark.parametrize("strategy", ["mirrored", "servers"])
def test_a_worker_that_leaves_with_an_exit_code_is_the_cause(tmp_path, strategy):
    script = str(cluster.HERE / "fault_worker.py")
    launch = [sys.executable, "-m", "keras_mirror", "launch", "--workers", "2"]
    done = subprocess.run(
        [*launch, script, str(tmp_path), "leaves"],
        env=cluster.environment(1) | chosen(strategy),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 3, done.stderr[-6000:]
    cause = done.stderr.rpartition("keras-mirror launch: error: ")[2]
    assert cause.startswith("worker 1 failed first") and "exit code 3" in cause


def test_who_has_ended_waits_for_one_that_works_on(tmp_path):
    assert results(tmp_path, "works_on", more={"HEARTBEAT": "3"}) == [{}, {}]


def test_training_on_alone_is_an_error_at_once(start):
    workers = start("ends_early")
    begin = time.monotonic()
    assert workers.processes[1].wait(timeout=50) == 1, workers.logs()
    assert time.monotonic() - begin < 45  # not LATE_SECONDS later
    said = "worker 0: the end of the program; worker 1: the state of random"
    assert said in workers.log(1), workers.logs()
    assert workers.wait(30)[0] == 0


def test_other_calls_are_named_and_what_differs_in_them(tmp_path):
    chief, other = results(tmp_path, "calls_others")
    assert other["heard"] == chief["heard"]
    assert all(text.startswith("WorkersDiffer") for text in chief["heard"].values())
    predict, compiled, momentum, slots = chief["heard"].values()
    assert "worker 0: the chief's variables, for `predict`" in predict
    assert "worker 1: the chief's variables, for `evaluate`" in predict
    assert "make the same calls" in predict
    assert "worker 0: the state of random generators, for `fit`" in compiled
    assert "worker 1: the chief's variables, for `compile`" in compiled
    assert "worker 1: " in momentum and "optimizer.momentum=0.8" in momentum
    assert "learning_rate" not in momentum  # is alike
    assert re.search(r"worker 0: \d+ var\S+ of which number \d+ is '?sgd", slots)
    assert_same("weights", other["weights"], chief["weights"], 0)


def test_failing_data_on_one_worker_is_named_on_the_other(start):
    workers = start("generator_fails")
    assert_all_fail(workers)
    assert "OSError: no such shard" in workers.log(0), workers.logs()


def test_different_data_is_an_error_on_every_worker(start):
    workers = start("other_batches")
    assert_all_fail(workers)
    for index in (0, 1):
        assert "worker 0: 8 rows; worker 1: 4 rows" in workers.log(index)


def test_one_worker_stops_all_after_the_same_epoch(tmp_path):
    assert results(tmp_path, "stops_at_epoch") == [{"epochs": 3}] * 2


@STRATEGIES
def test_one_worker_stops_all_after_the_same_batch(tmp_path, strategy):
    chief, other = results(tmp_path, "stops_at_batch", more=chosen(strategy))
    assert chief["iterations"] == other["iterations"] == 3 + 2
    training.keras.utils.set_random_seed(7)
    model = training.compiled(training.mlp())
    stop = training.StopsAfter(3 + 2)
    x, y = training.X[:24], training.Y[:24]
    model.fit(x, y, batch_size=8, epochs=5, verbose=0, callbacks=[stop])
    for worker in (chief, other):
        assert_same("weights", worker["weights"], model.get_weights())


def test_the_chief_alone_writes(tmp_path):
    chief, other = results(tmp_path, "writes", needs=["tensorflow", "tensorboard"])
    assert not other["written"]
    assert_same("weights", other["weights"], chief["weights"], 0)
    names = {path.name for path in (tmp_path / "files").iterdir()}
    assert names == {
        "best.keras",
        "backup",
        "log.csv",
        "board",
        "last.keras",
        "last.weights.h5",
    }


# What both find out together.
TOGETHER = (
    "rows",
    "evaluate",
    "predict",
    "steps",
    "run_eagerly",
    "callbacks",
    "weights",
    "a weight",
    "rates",
    "dtypes",
)


@STRATEGIES
def test_workers_that_catch_an_error_of_one_go_on_together(tmp_path, strategy):
    chief, other = results(tmp_path, "errors_of_one", more=chosen(strategy))
    for name, said in chief["heard"].items():
        heard = other["heard"][name]
        if name in TOGETHER:
            assert said == heard and said.startswith("WorkersDifferError"), said
        else:
            assert said.startswith("WorkerFailedError: "), (name, said)
            assert heard in said and heard, (name, said)
    assert "3 steps; worker 1: 1 epochs of 2 steps" in chief["heard"]["rows"]
    for name in ("evaluate", "predict"):
        assert (
            f"worker 0: batch 3 to {name}; worker 1: the end of"
            in (chief["heard"][name])
        )
    assert "must bring the same step" in chief["heard"]["steps"]
    assert "worker 0: none (0 set between" in chief["heard"]["weights"]
    assert "worker 1: none (0 set between" in chief["heard"]["a weight"]
    assert "dense/kernel" in chief["heard"]["weights"]
    assert "learning rate" in chief["heard"]["rates"]
    assert "worker 0: 0.00999" in chief["heard"]["rates"]
    assert "worker 1: 0.01999" in chief["heard"]["rates"]
    assert "a step that is not compiled" in chief["heard"]["run_eagerly"]
    assert "worker 0: ConsistencyCheck; worker 1: none" in chief["heard"]["callbacks"]
    assert "worker 1: int32[8, 6]" in chief["heard"]["dtypes"]
    assert chief["ended"] == other["ended"] == [signal.SIGTERM] * 2
    # As in plain Keras, the first batch is trained on.
    assert set(chief["stopped"].values()) == {1}
    assert other["stopped"] == chief["stopped"]
    assert_same("weights", other["weights"], chief["weights"], 0)


def test_own_parts_make_one_global_batch(tmp_path):
    found = results(tmp_path, "own_parts")
    training.keras.utils.set_random_seed(7)
    model = training.compiled(training.mlp())
    x, y = training.X[:24], training.Y[:24]
    for rows in (
        [*range(6), *range(15, 21)],
        [*range(6, 15), *range(21, 24)],
    ):
        model.train_on_batch(x[rows], y[rows])
    for worker in found:
        assert_same("weights", worker["weights"], model.get_weights())
    predicted = np.concatenate([worker["predicted"] for worker in found])
    assert_same("predicted", predicted, model.predict(x, verbose=0))


KILLED = (["--max-restarts", "1"], "worker 1 failed first")
CHIEF_KILLED = (["--max-restarts", "1"], "worker 0 failed first")


@pytest.mark.parametrize(
    ("program", "options", "text", "batches", "strategy"),
    [
        ("preempted", [], "worker 1 got SIGTERM", [0, 1, 2], "mirrored"),
        ("preempted", [], "worker 1 got SIGTERM", [0, 1, 2], "servers"),
        ("killed_between_backups", *KILLED, [0, 1, 0, 1, 2], "mirrored"),
        ("killed_after_a_backup", *KILLED, [0, 1, 2], "mirrored"),
        ("killed_after_a_backup", *KILLED, [0, 1, 2], "servers"),
        ("killed_at_epoch_end", *KILLED, [0, 1, 2, 2], "mirrored"),
        ("killed_while_saving", *CHIEF_KILLED, None, "mirrored"),
    ],
)
def test_a_restarted_job_ends_with_the_weights_of_an_unbroken_one(
    tmp_path, program, options, text, batches, strategy
):
    script = str(cluster.HERE / "fault_worker.py")
    launch = [sys.executable, "-m", "keras_mirror", "launch", "--workers", "2"]
    launch += ["--devices-per-worker", "1", *options]
    done = subprocess.run(
        [*launch, script, str(tmp_path), program],
        env=cluster.environment(1) | chosen(strategy),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert text in done.stderr
    assert (tmp_path / "started").exists()
    training.keras.utils.set_random_seed(7)
    model = training.with_dropout()
    x, y = training.X[:24], training.Y[:24]
    history = model.fit(x, y, batch_size=8, epochs=5, verbose=0).history
    for index in (0, 1):
        with open(tmp_path / f"result{index}.pickle", "rb") as file:
            found = pickle.load(file)
        assert_same("weights", found["weights"], model.get_weights())
        for name, values in history.items():
            assert_same(name, found["history"][name], values[-3:])
        trained = (tmp_path / f"batches{index}").read_text().split()
        whole = [0, 1, 2]
        if batches is not None:
            assert [*map(int, trained)] == [*whole, *whole, *batches, *whole, *whole]


def test_a_signal_that_comes_too_late_for_all_is_not_lost(start):
    workers = start("asked_at_the_end")
    assert workers.processes[1].wait(timeout=60) == -signal.SIGTERM, workers.logs()
    workers.kill()


def test_a_variable_that_drifts_is_named_on_every_worker(start):
    workers = start("drifts")
    assert_all_fail(workers)
    for index in (0, 1):
        assert "dense/bias' differs on worker 1, replica 0" in workers.log(index)


def test_a_late_worker_is_named(start):
    workers = start("late")
    assert_all_fail(workers, seconds=60)
    assert "Received nothing from worker 1 within 3 seconds" in workers.log(0)


def test_a_worker_that_hangs_ends_the_other(start):
    workers = start("hangs")
    begin = time.monotonic()
    assert workers.processes[0].wait(timeout=80) != 0, workers.logs()
    assert time.monotonic() - begin < 60
    said = workers.log(0).partition("stopped sending heartbeats")[2]
    assert re.match(r"\W*1\b", said), workers.logs()
    workers.kill()


def test_another_model_is_an_error_on_every_worker(start):
    workers = start("other_model")
    assert_all_fail(workers, seconds=60)
    for index in (0, 1):
        assert "All workers must bring the same variables" in workers.log(index)
