"""The workers meet, or each that came is told who is missing."""

import contextlib
import os
import socket
import threading
import time

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


def come_each(port, indices, count, *, seconds=10.0, counts=None):
    """What each worker got, in their order: None, or its error."""
    found = ["it hangs"] * len(indices)

    def one(turn, index):
        try:
            own = (counts or {}).get(index, count)
            meet(place(port, index, own), timeout_seconds=seconds)
            found[turn] = None
        except errors.ClusterStartError as error:
            found[turn] = str(error)

    threads = [threading.Thread(target=one, args=turn) for turn in enumerate(indices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return found


def come(port, indices, count, **options):
    """The same by index."""
    found = come_each(port, indices, count, **options)
    return dict(zip(indices, found, strict=True))


@contextlib.contextmanager
def at_once(seconds=10.0):
    """Fails where what is inside waits for a timeout."""
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < seconds


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


@contextlib.contextmanager
def other_program(answer):
    """Listens, and says something else than a chief, or nothing; gives its port."""
    connections = []

    def serve(server):
        with contextlib.suppress(OSError):
            while True:
                connections.append(server.accept()[0])
                connections[-1].sendall(answer)

    with contextlib.closing(socket.socket()) as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_port_that_is_taken_is_said_on_every_worker(answer):
    with other_program(answer) as port, at_once(15):
        chief, *others = come_each(port, [0, 1, 2], 3, seconds=60.0)
    assert "cannot listen" in chief and "a port that is free" in chief
    for said in others:
        assert "another program than the chief" in said
        assert "a port that is free" in said


def test_a_proxy_that_hangs_up_is_no_other_program():
    def hang_up():
        with contextlib.suppress(OSError):
            while True:
                proxy.accept()[0].close()

    with contextlib.closing(socket.socket()) as proxy:
        proxy.bind(("127.0.0.1", 0))
        proxy.listen()
        threading.Thread(target=hang_up, daemon=True).start()
        said = come(proxy.getsockname()[1], [1], 2, seconds=1.0)[1]
        proxy.shutdown(socket.SHUT_RDWR)
    assert "could not reach the chief within 1 seconds" in said


def test_workers_that_count_differently_are_told():
    with at_once():
        found = come(free_port(), [0, 1, 2], 4, seconds=30.0, counts={1: 2})
    for said in found.values():
        who = f"worker 1 (process {os.getpid()} at 127.0.0.1)"
        assert f"The chief counts 4 workers, {who} counts 2" in said


def test_a_worker_of_another_list_is_told_as_all_who_came():
    port, found = free_port(), {}

    def one(index, workers):
        address = f"127.0.0.1:{port}"
        membership = Membership(address, 2, index, "a test", (address, *workers))
        with pytest.raises(errors.ClusterStartError) as caught:
            meet(membership, timeout_seconds=30.0)
        found[index] = str(caught.value)

    lists = [["b:2"], ["c:3"]]
    threads = [threading.Thread(target=one, args=place) for place in enumerate(lists)]
    with at_once():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
    for said in found.values():
        assert "has another list of workers than the chief" in said and "b:2" in said
    assert set(found) == {0, 1}


def test_two_workers_with_one_index_are_told_as_all_who_came():
    with at_once():
        found = come_each(free_port(), [0, 1, 1, 2], 4, seconds=30.0)
    for said in found:
        assert "with the index 1: process" in said
        assert said.count(f"process {os.getpid()} at 127.0.0.1") == 2
        assert "an index of its own" in said


def test_two_chiefs_are_told_as_all_who_came():
    with at_once():
        found = come_each(free_port(), [0, 0, 1], 3, seconds=30.0)
    for said in found:
        assert "with the index 0: the chief and process" in said


def test_a_worker_that_starts_again_takes_its_place_again():
    port = free_port()

    def come_and_go():
        with contextlib.closing(knock(port)) as guest:
            guest.sendall(b"keras_mirror 1 3 7\n")
            assert guest.recv(100)
        found.update(come(port, [1, 2], 3))

    found = {}
    threading.Timer(0.2, come_and_go).start()
    found[0] = come(port, [0], 3)[0]
    wait_until(lambda: len(found) == 3)
    assert found == dict.fromkeys(range(3))


def knock(port):
    """A connection, as soon as somebody listens."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        time.sleep(0.05)
    raise AssertionError("nobody listens")


def wait_until(claim, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < deadline
        time.sleep(0.02)


STRANGERS = {
    "silent": b"",
    "rubbish": b"GET / HTTP/1.1\r\n",
    "no text": b"\xff\xfe\n",
    "endless": b"x" * 10_000,
    "no number": b"keras_mirror one 2 3\n",
    "no such index": b"keras_mirror 7 2 3\n",
}


def test_strangers_hold_nobody_up():
    port, guests, found = free_port(), [], {}

    def others():
        for said in STRANGERS.values():
            guests.append(knock(port))
            with contextlib.suppress(OSError):
                guests[-1].sendall(said)
        found.update(come(port, [1], 2))

    thread = threading.Thread(target=others)
    with at_once():
        thread.start()
        assert come(port, [0], 2) == {0: None}
        thread.join(timeout=10)
    assert found == {1: None}
    for guest in guests:
        guest.close()


@pytest.mark.parametrize("address", ["203.0.113.1:9000", "nowhere.invalid:9000"])
def test_a_chief_must_have_its_address(address):
    with pytest.raises(errors.ClusterStartError, match=f"cannot listen.*{address}"):
        meet(Membership(address, 2, 0, "a test"), timeout_seconds=1)
