"""The workers meet at the coordinator's address before JAX's runtime starts.

JAX ends the process where a worker does not come. Here it is said who is missing, and
why: the port is taken, nobody listens, or so many of so many have arrived.
"""

import contextlib
import select
import socket
import time

from keras_mirror import errors
from keras_mirror.cluster.spec import Membership

_HELLO = "keras_mirror"
_MOST_BYTES = 4096
_RETRY_SECONDS = 0.2


def meet(membership: Membership, *, timeout_seconds: float) -> None:
    """Returns when all workers are there.

    Args:
        membership: With a coordinator, a count and an index.
        timeout_seconds: How long to wait.

    Raises:
        ClusterStartError: On every worker that came: the port is taken, nobody
            listens, or workers are missing (they are named).
    """
    deadline = time.monotonic() + timeout_seconds
    if membership.index == 0:
        _gather(membership, deadline, timeout_seconds)
    else:
        _arrive(membership, deadline, timeout_seconds)


def _address(membership: Membership) -> tuple[str, int]:
    host, _, port = str(membership.coordinator).rpartition(":")
    return host.strip("[]"), int(port)


def _missing(membership: Membership, there: int, missing: str, seconds: float) -> str:
    return (
        f"{there} of {membership.num_workers} workers have arrived within "
        f"{seconds:g} seconds; missing: {missing}."
    )


def _gather(membership: Membership, deadline: float, seconds: float) -> None:
    host, port = _address(membership)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((host, port))
            server.listen(membership.num_workers or 1)
        except OSError as error:
            raise errors.ClusterStartError(
                membership.coordinator,
                f"The chief cannot listen at its address ({error.strerror}).",
                "Name an address of this machine and a port that is free.",
            ) from error
        there: dict[int, socket.socket] = {}
        while len(there) + 1 < (membership.num_workers or 1):
            if time.monotonic() > deadline:
                wanted = range(1, membership.num_workers or 1)
                names = ", ".join(f"worker {i}" for i in wanted if i not in there)
                said = _missing(membership, len(there) + 1, names, seconds)
                _tell(there, said)
                raise errors.ClusterStartError(membership.coordinator, said, _FIX)
            if select.select([server], [], [], _RETRY_SECONDS)[0]:
                guest = stack.enter_context(server.accept()[0])
                index = _greeted(guest, membership)
                if index is not None:
                    there[index] = guest
        _tell(there, "go")


_FIX = "See that every worker is started, and the logs of those that are missing."


def _greeted(guest: socket.socket, membership: Membership) -> int | None:
    """The index of a worker that says hello; None for anybody else."""
    guest.settimeout(5)
    with contextlib.suppress(OSError, ValueError):
        name, index, count = guest.recv(_MOST_BYTES).decode().split()
        known = range(1, membership.num_workers or 1)
        if name == _HELLO and int(index) in known:
            if int(count) == membership.num_workers:
                return int(index)
            guest.sendall(
                f"The chief counts {membership.num_workers} workers, worker {index} "
                f"counts {count}.".encode()
            )
    return None


def _tell(there: dict[int, socket.socket], text: str) -> None:
    for guest in there.values():
        with contextlib.suppress(OSError):
            guest.sendall(text.encode())


def _arrive(membership: Membership, deadline: float, seconds: float) -> None:
    address, said = _address(membership), ""
    with contextlib.ExitStack() as stack:
        chief = None
        while chief is None:
            try:
                chief = socket.create_connection(address, timeout=5)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise errors.ClusterStartError(
                        membership.coordinator,
                        f"Worker {membership.index} could not reach the chief within "
                        f"{seconds:g} seconds ({error}).",
                        "See that the chief is started, and that its address can be "
                        "reached from here.",
                    ) from error
                time.sleep(_RETRY_SECONDS)
        stack.enter_context(chief)
        hello = f"{_HELLO} {membership.index} {membership.num_workers}"
        # The chief's patience began when it came, and ends with an answer.
        chief.settimeout(max(1.0, deadline - time.monotonic()) + seconds)
        with contextlib.suppress(OSError):
            chief.sendall(hello.encode())
            said = chief.recv(_MOST_BYTES).decode()
    if said != "go":
        raise errors.ClusterStartError(
            membership.coordinator, said or "The chief has gone away.", _FIX
        )
