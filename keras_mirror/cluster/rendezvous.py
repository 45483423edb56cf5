"""The workers meet at the coordinator's address before JAX's runtime starts.

JAX ends the process where a worker does not come. Here it is said who is missing, or
why nobody can start: the port is taken, nobody listens, two workers have one index, or
they count differently.

The chief greets whoever connects with one line, a worker with another; then the worker
waits for a third, which is "go" or, as JSON, what is wrong and the fix.
"""

import contextlib
import json
import os
import socket
import time

from keras_mirror import errors
from keras_mirror.cluster.gathering import (
    GREETING_SECONDS,
    MOST_BYTES,
    NAME,
    Gathering,
    introduction,
)
from keras_mirror.cluster.spec import Membership

_RETRY_SECONDS = 0.2


def meet(membership: Membership, *, timeout_seconds: float) -> None:
    """Returns when all workers are there.

    Args:
        membership: With a coordinator, a count and an index.
        timeout_seconds: How long to wait.

    Raises:
        ClusterStartError: On every worker that came: the port is taken, nobody
            listens, two came as one, they count differently, or workers are missing
            (they are named).
    """
    deadline = time.monotonic() + timeout_seconds
    if membership.index == 0:
        _gather(membership, deadline, timeout_seconds)
    else:
        _arrive(membership, deadline, timeout_seconds)


def _address(membership: Membership) -> tuple[str, int]:
    host, _, port = str(membership.coordinator).rpartition(":")
    return host.strip("[]"), int(port)


def _gather(membership: Membership, deadline: float, seconds: float) -> None:
    host, port = _address(membership)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((host, port))
            server.listen(membership.num_workers or 1)
        except OSError as error:
            _knock(membership, min(GREETING_SECONDS, seconds))
            raise errors.ClusterStartError(
                membership.coordinator,
                f"The chief cannot listen at its address ({error.strerror}).",
                "Name an address of this machine and a port that is free.",
            ) from error
        with Gathering(membership, server) as gathering:
            gathering.wait(deadline, seconds)


def _knock(membership: Membership, seconds: float) -> None:
    """Where the address is another chief's, lets it know, and says what it says."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(_address(membership), timeout=seconds) as other,
    ):
        if _answer(other, membership) == NAME:
            _obey(other, membership, time.monotonic() + seconds)


def _arrive(membership: Membership, deadline: float, seconds: float) -> None:
    stranger_since = None
    while True:
        try:
            with socket.create_connection(
                _address(membership), timeout=GREETING_SECONDS
            ) as chief:
                began = time.monotonic()
                answer = _answer(chief, membership)
                if answer == NAME:
                    # The chief's patience began when it came, and ends with a word.
                    return _obey(chief, membership, max(began, deadline) + seconds)
                if answer:
                    stranger_since = stranger_since or began
                said = "the connection is closed"
        except OSError as error:
            said = str(error)
        now = time.monotonic()
        if stranger_since and now - stranger_since > GREETING_SECONDS:
            raise errors.ClusterStartError(
                membership.coordinator,
                f"Worker {membership.index} found another program than the chief at "
                "its address.",
                "Name a port that is free on the chief's machine. If it is a job of "
                "this cluster that has started already, end it before.",
            )
        if now > deadline:
            raise errors.ClusterStartError(
                membership.coordinator,
                f"Worker {membership.index} could not reach the chief within "
                f"{seconds:g} seconds ({said}).",
                "See that the chief is started, and that its address can be reached "
                "from here.",
            )
        time.sleep(_RETRY_SECONDS)


def _answer(chief: socket.socket, membership: Membership) -> str:
    """Says who this is, and hears who listens; "" where the connection is closed.

    A proxy closes it while the chief behind it has not started.
    """
    chief.sendall(introduction(membership, os.getpid()).encode())
    try:
        return _line(chief, time.monotonic() + GREETING_SECONDS)
    except TimeoutError:
        return "(silence)"


def _obey(chief: socket.socket, membership: Membership, deadline: float) -> None:
    """Waits for the chief's last word, and raises what it says."""
    said = ""
    with contextlib.suppress(OSError):
        said = _line(chief, deadline)
    if said == "go":
        return
    what = "The chief has gone away."
    fix = "See the chief's log, and that no other job has its address."
    with contextlib.suppress(ValueError):
        what, fix = json.loads(said)
    raise errors.ClusterStartError(membership.coordinator, what, fix)


def _line(connection: socket.socket, deadline: float) -> str:
    """One line; what there is of it where the other side ends."""
    found = b""
    while not found.endswith(b"\n") and len(found) < MOST_BYTES:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        part = connection.recv(1)
        if not part:
            break
        found += part
    return found.decode(errors="replace").strip()
