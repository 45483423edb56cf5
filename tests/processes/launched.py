"""Scripts for the launcher's tests: no framework, so that each start is quick."""

import atexit
import os
import signal
import subprocess
import sys
import time

rank = int(os.environ["KERAS_DISTRIBUTION_PROCESS_ID"])


def say():
    print(
        f"rank {rank} of {os.environ['KERAS_DISTRIBUTION_NUM_PROCESSES']}", flush=True
    )
    print(os.environ.get("XLA_FLAGS"), *sys.argv[2:], flush=True)


def fail():
    """Worker 1 raises; the others end of it a little later, with another code."""
    if rank == 1:
        raise ValueError("the first cause")
    time.sleep(0.2)
    sys.exit(9)


def fail_and_wait():
    """Worker 1 raises and waits at its end, while worker 0 ends of it."""
    import keras_mirror  # noqa: F401

    if rank == 1:
        atexit.register(time.sleep, 2)
        open(sys.argv[2], "w").close()
        raise ValueError("the first cause")
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.05)
    time.sleep(0.3)
    sys.exit(9)


def lose_each_other():
    """Worker 1 aborts: it takes its time to end, and worker 0 hears of it before."""
    import keras_mirror  # noqa: F401

    if rank == 0:
        open(sys.argv[2], "w").close()
        raise ValueError("UNKNOWN: Gloo AllGather failed: Connection reset by peer")
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.05)
    time.sleep(0.3)
    os.abort()


def lose_a_silent_one():
    """JAX's runtime ends worker 0, since it hears nothing of worker 1."""
    if rank == 0:
        print(
            "Terminating process because the JAX distributed service detected fatal "
            "errors. This most likely indicates that another task died; [...] The "
            "following tasks are unhealthy (stopped sending heartbeats):\n1\nThe tasks "
            "have crashed.",
            flush=True,
        )
        time.sleep(0.5)
        os.abort()
    if sys.argv[2] == "waits":
        time.sleep(60)


def lose_the_chief():
    """JAX's runtime ends worker 1, and keras_mirror has said why."""
    if rank == 0:
        time.sleep(60)
    print(
        "keras_mirror: worker 1 has heard nothing from worker 0, the chief at a:1.\n"
        "This most likely indicates that another task died;",
        flush=True,
    )
    time.sleep(0.5)
    os.abort()


def leave_and_wait():
    """Worker 1 is done, and waits until worker 0, which trains with it, has failed."""
    from keras_mirror import errors

    if rank == 0:
        raise errors.WorkerFailedError(1, "SystemExit: 7")
    time.sleep(1.5)
    sys.exit(7)


def flood():
    for line in range(30000):
        print("line", line)
    with open(sys.argv[2] + str(rank), "w") as file:
        print("all", file=file)


def be_killed():
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def ignore_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print("child", child.pid, flush=True)
    if rank == 1:
        time.sleep(0.5)
        sys.exit(3)
    time.sleep(60)


def wait():
    print("pid", os.getpid(), flush=True)
    time.sleep(60)


def wait_with_child():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print("pid", child.pid, flush=True)
    wait()


def end_twice(exit_code):
    """Counts its starts in a file; the third goes well."""
    if rank == 0:
        with open(sys.argv[2], "a+") as file:
            file.write("x")
            file.seek(0)
            starts = len(file.read())
        if starts < 3:
            sys.exit(exit_code)


def fail_twice():
    end_twice(4)


def preempted():
    """Is preempted twice, which is no failure."""
    end_twice(75)


globals()[sys.argv[1]]()
