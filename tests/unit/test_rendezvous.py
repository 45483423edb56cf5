"""The workers meet, or each that came is told who is missing."""

import contextlib
import socket
import threading

import pytest

from keras_mirror import errors
from keras_mirror.cluster import Membership
from keras_mirror.cluster.rendezvous import meet


def free_port():
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def place(port, index, count):
    return Membership(f"127.0.0.1:{port}", count, index, "a test")


def come(port, indices, count, *, seconds=10.0, counts=None):
    """What each worker got: None, or its error."""
    found = {}

    def one(index):
        try:
            own = (counts or {}).get(index, count)
            meet(place(port, index, own), timeout_seconds=seconds)
            found[index] = None
        except errors.ClusterStartError as error:
            found[index] = str(error)

    threads = [threading.Thread(target=one, args=(index,)) for index in indices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return found


def test_all_meet():
    assert come(free_port(), [3, 1, 0, 2], 4) == dict.fromkeys(range(4))


def test_a_missing_worker_is_named_on_all_that_came():
    found = come(free_port(), [0, 2], 4, seconds=1.0)
    for said in found.values():
        assert "2 of 4 workers have arrived within 1 seconds" in said
        assert "missing: worker 1, worker 3" in said
    assert set(found) == {0, 2}


def test_a_missing_chief_is_said_with_its_address():
    port = free_port()
    said = come(port, [1], 2, seconds=0.5)[1]
    assert "could not reach the chief within 0.5 seconds" in said
    assert f"127.0.0.1:{port}" in said


def test_a_port_that_is_taken_is_said():
    with contextlib.closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        said = come(other.getsockname()[1], [0], 2, seconds=1.0)[0]
    assert "cannot listen" in said and "a port that is free" in said


def test_workers_that_count_differently_are_told():
    found = come(free_port(), [0, 1], 3, seconds=1.0, counts={1: 2})
    assert "counts 3 workers, worker 1 counts 2" in found[1]
    assert "1 of 3 workers" in found[0]


def test_strangers_are_ignored():
    port = free_port()

    def stranger():
        with contextlib.suppress(OSError):
            guest = socket.create_connection(("127.0.0.1", port), timeout=5)
            guest.sendall(b"GET / HTTP/1.1")
            guest.close()

    threading.Timer(0.2, stranger).start()
    threading.Timer(0.4, stranger).start()
    found = {}
    threading.Timer(0.6, lambda: found.update(come(port, [1], 2))).start()
    assert come(port, [0], 2) == {0: None}


@pytest.mark.parametrize("address", ["203.0.113.1:9000", "nowhere.invalid:9000"])
def test_a_chief_must_have_its_address(address):
    with pytest.raises(errors.ClusterStartError, match=f"cannot listen.*{address}"):
        meet(Membership(address, 2, 0, "a test"), timeout_seconds=1)
