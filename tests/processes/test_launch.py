"""`keras-mirror launch` with real processes: start, failure, signals, orphans."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = pathlib.Path(__file__).with_name("launched.py")


def command(*arguments, options=("--workers", "2")):
    launch = [sys.executable, "-m", "keras_mirror", "launch", *options]
    return [*launch, str(SCRIPT), *map(str, arguments)]


def environment():
    return os.environ | {"PYTHONPATH": str(ROOT)}


def launched(*arguments, options=("--workers", "2"), seconds=60):
    return subprocess.run(
        command(*arguments, options=options),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def is_alive(pid):
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except FileNotFoundError:
        return False
    return state.split()[0] != "Z"


def wait_until(claim, seconds=15):
    deadline = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)


def test_output_is_prefixed_and_kept_by_rank(tmp_path):
    options = ("--workers", "2", "--devices-per-worker", "3", "--log-dir", tmp_path)
    done = launched("say", "--flag", "7", options=tuple(map(str, options)))
    assert done.returncode == 0, done.stderr
    assert not done.stdout
    for rank in (0, 1):
        assert f"[{rank}] rank {rank} of 2" in done.stderr
        kept = (tmp_path / f"rank{rank}.log").read_text()
        assert kept.startswith(f"rank {rank} of 2")
        assert "device_count=3 --flag 7" in kept


def test_a_module_can_be_launched():
    launch = [sys.executable, "-m", "keras_mirror", "launch", "-m", "platform"]
    done = subprocess.run(launch, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and "[0] Linux" in done.stderr


def test_nodes_share_one_numbering():
    options = ("--nodes", "2", "--node-rank", "1", "--coordinator", "127.0.0.1:9")
    done = launched("say", options=(*options, "--workers", "2"))
    assert "rank 2 of 4" in done.stderr and "rank 3 of 4" in done.stderr


def test_the_first_failure_is_the_cause(tmp_path):
    done = launched("fail", options=("--workers", "3", "--log-dir", str(tmp_path)))
    assert done.returncode == 1
    cause = done.stderr.partition("keras-mirror launch:")[2]
    assert "worker 1 failed first" in cause
    assert "exit code 1" in cause and "ValueError: the first cause" in cause
    assert str(tmp_path / "rank1.log") in cause
    assert re.search(r"host \S+, pid \d+", cause)


def test_what_raised_first_is_the_cause_though_another_ended_first(tmp_path):
    done = launched("fail_and_wait", tmp_path / "raised")
    assert done.returncode == 1
    cause = done.stderr.partition("keras-mirror launch:")[2]
    assert "worker 1 failed first" in cause and "exit code 1" in cause
    assert "Traceback" in cause and "ValueError: the first cause" in cause


def test_a_lost_connection_is_not_the_cause(tmp_path):
    done = launched("lose_each_other", tmp_path / "raised")
    assert done.returncode == 128 + signal.SIGABRT
    assert "worker 1 failed first" in done.stderr and "SIGABRT" in done.stderr


@pytest.mark.parametrize(
    ("end", "said"),
    [("waits", r"\(pid \d+, which stands still\)"), ("ends", r"\(exit code 0\)")],
)
def test_a_worker_that_nobody_hears_of_is_the_cause(end, said):
    done = launched("lose_a_silent_one", end)
    assert done.returncode == 128 + signal.SIGABRT
    cause = done.stderr.partition("keras-mirror launch: error: ")[2]
    text = rf"worker 1 {said} was gone, and so worker 0 failed first"
    assert re.match(text, cause), cause


def test_a_chief_that_stands_still_is_the_cause():
    done = launched("lose_the_chief")
    cause = done.stderr.partition("keras-mirror launch: error: ")[2]
    assert re.match(r"worker 0 \(pid \d+, which stands still\) was gone", cause), cause


def test_who_left_is_the_cause_though_it_ends_last():
    done = launched("leave_and_wait")
    assert done.returncode == 7
    assert "worker 1 failed first" in done.stderr and "exit code 7" in done.stderr


@pytest.mark.parametrize("place", ["stderr", "log"])
def test_output_that_cannot_be_written_holds_nobody_up(tmp_path, place):
    options = ("--workers", "2", "--log-dir", str(tmp_path))
    if place == "log":
        (tmp_path / "rank1.log").symlink_to("/dev/full")
    process = subprocess.Popen(
        command("flood", tmp_path / "end", options=options),
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    if place == "stderr":
        process.stderr.readline()
        process.stderr.close()
    else:
        assert "No space left on device" in process.communicate(timeout=60)[1]
    assert process.wait(timeout=60) == 0
    for rank in (0, 1):
        assert (tmp_path / f"end{rank}").read_text() == "all\n"


def test_a_log_that_cannot_be_written_is_named_before_anything_runs(tmp_path):
    (tmp_path / "rank1.log").mkdir()
    options = ("--workers", "2", "--log-dir", str(tmp_path))
    done = launched("wait", options=options)
    assert done.returncode == 2
    assert f"'{tmp_path}/rank1.log' (Is a directory)" in done.stderr


def test_a_killed_worker_is_named_with_its_signal_and_ends_the_others():
    start = time.monotonic()
    done = launched("be_killed")
    assert done.returncode == 128 + signal.SIGKILL
    assert "worker 1 failed first" in done.stderr and "SIGKILL" in done.stderr
    assert time.monotonic() - start < 10


def test_what_ignores_sigterm_is_killed_with_its_children():
    done = launched("ignore_sigterm")
    assert done.returncode == 3
    children = {int(pid) for pid in re.findall(r"child (\d+)", done.stderr)}
    assert len(children) == 2
    wait_until(lambda: not any(map(is_alive, children)))


def start_waiting(script="wait"):
    process = subprocess.Popen(
        command(script), env=environment(), stderr=subprocess.PIPE, text=True
    )
    pids = []
    while len(pids) < {"wait": 2, "wait_with_child": 4}[script]:
        pids += map(int, re.findall(r"pid (\d+)", process.stderr.readline()))
    return process, pids


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on(number):
    process, pids = start_waiting()
    process.send_signal(number)
    assert process.wait(timeout=15) == 128 + number
    process.stderr.close()
    assert not any(map(is_alive, pids))


def test_no_orphans_when_the_launcher_is_killed():
    process, pids = start_waiting("wait_with_child")
    assert len(pids) == 4  # the workers', and what they have started
    process.kill()
    process.wait()
    process.stderr.close()
    wait_until(lambda: not any(map(is_alive, pids)))


def test_a_failed_job_is_started_again(tmp_path):
    counter = tmp_path / "starts"
    options = ("--workers", "2", "--max-restarts", "2")
    done = launched("fail_twice", counter, options=options)
    assert done.returncode == 0, done.stderr
    assert counter.read_text() == "xxx"
    counter.unlink()
    options = ("--workers", "2", "--max-restarts", "1")
    done = launched("fail_twice", counter, options=options)
    assert done.returncode == 4 and counter.read_text() == "xx"


def test_preemption_is_no_failure(tmp_path):
    counter = tmp_path / "starts"
    done = launched("preempted", counter)
    assert done.returncode == 0, done.stderr
    assert counter.read_text() == "xxx"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--workers", "0"), "at least 1"),
        (("--nodes", "2"), "coordinator"),
        (("--nodes", "2", "--node-rank", "2", "--coordinator", "a:1"), "0 to 1"),
        (("--max-restarts", "-1"), "at least 0"),
        (("--coordinator", "somewhere"), "HOST:PORT"),
        (("--coordinator", ":5"), "HOST:PORT"),
        (("--coordinator", "a:0"), "from 1 to 65535"),
        (("--coordinator", "a:99999"), "from 1 to 65535"),
        (("--coordinator", "10.0.0.1:9000:1"), "HOST:PORT"),
        (("--coordinator", "a b:80"), "HOST:PORT"),
        (("--max-restarts", "z"), "must be a whole number"),
        (("--log-dir", __file__), "log_dir must be a folder"),
    ],
)
def test_wrong_usage_is_refused(options, text):
    done = launched("say", options=options)
    assert done.returncode == 2 and text in done.stderr


def test_a_script_that_is_not_there_is_named():
    launch = [sys.executable, "-m", "keras_mirror", "launch", "nowhere.py"]
    done = subprocess.run(launch, env=environment(), capture_output=True, text=True)
    assert done.returncode == 2 and "nowhere.py" in done.stderr
