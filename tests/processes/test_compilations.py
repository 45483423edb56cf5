"""A strategy compiles no more programs than plain Keras does on one device."""

import json
import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).with_name("count_compilations.py")


def compilations(strategy):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), strategy],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_mirrored_training_compiles_no_more_than_one_device():
    plain, mirrored = compilations("plain"), compilations("mirrored")
    assert plain["fit"] > 0
    for call, count in plain.items():
        assert mirrored[call] <= count, (call, mirrored, plain)
