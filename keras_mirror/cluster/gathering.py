"""The chief's side of the meeting: it hears all who connect at once.

Who stays silent or says something else holds nobody up.
"""

import contextlib
import json
import selectors
import socket
import time
import zlib
from dataclasses import dataclass, field
from typing import NoReturn

from keras_mirror import errors
from keras_mirror.cluster.spec import Membership

NAME = "keras_mirror"
MOST_BYTES = 4096
# What a program may take to say that it is one of us.
GREETING_SECONDS = 5.0
_LOOK_SECONDS = 0.2
# Long enough for those who knock again and again until a chief listens.
_FAREWELL_SECONDS = 0.6
_MISSING_FIX = "See that every worker is started, and the logs of those missing."
_INDEX_FIX = "Give every worker an index of its own, and start each once."
_COUNT_FIX = "Give every worker the same list of workers."


def introduction(membership: Membership, pid: int) -> str:
    """What a worker says first."""
    return (
        f"{NAME} {membership.index} {membership.num_workers} {pid} "
        f"{_checksum(membership)}\n"
    )


def _checksum(membership: Membership) -> int:
    """Of the list of workers; 0 where it is not known.

    Without the chief's address, which may have another name elsewhere.
    """
    others = membership.workers[1:]
    return zlib.crc32(" ".join(others).encode()) if others else 0


@dataclass(eq=False)
class _Guest:
    """Whoever has connected; a worker once it has said so."""

    connection: socket.socket
    host: str
    came_at: float = field(default_factory=time.monotonic)
    said: bytes = b""
    index: int | None = None
    pid: int = 0

    def __str__(self) -> str:
        return f"process {self.pid} at {self.host}"

    def tell(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self.connection.sendall(line.encode() + b"\n")

    def is_gone(self) -> bool:
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True


class Gathering:
    """The workers that have come to the chief.

    Args:
        membership: The chief's.
        server: A socket that listens.
    """

    def __init__(self, membership: Membership, server: socket.socket):
        self._membership = membership
        self._count = membership.num_workers or 1
        self._server = server
        self._guests: list[_Guest] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        server.setblocking(False)

    def __enter__(self) -> "Gathering":
        return self

    def __exit__(self, *_: object) -> None:
        for guest in list(self._guests):
            self._dismiss(guest)
        self._selector.close()

    def wait(self, deadline: float, seconds: float) -> None:
        """Returns when all workers have come and were told to go on.

        Raises:
            ClusterStartError: They cannot start; all who came are told the same.
        """
        while len(self._there()) + 1 < self._count:
            if time.monotonic() > deadline:
                self._refuse_missing(seconds)
            self._look(_LOOK_SECONDS)
            for guest in list(self._guests):
                if guest.index is None and guest.said.endswith(b"\n"):
                    self._introduce(guest)
            self._dismiss_silent()
        for guest in self._there().values():
            guest.tell("go")

    def _there(self) -> dict[int, _Guest]:
        return {g.index: g for g in self._guests if g.index is not None}

    def _look(self, seconds: float) -> list[_Guest]:
        """Takes in what has arrived; returns who is new."""
        before = list(self._guests)
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._welcome()
            else:
                self._hear(key.data)
        return [guest for guest in self._guests if guest not in before]

    def _welcome(self) -> None:
        with contextlib.suppress(OSError):
            connection, (host, *_) = self._server.accept()
            connection.setblocking(False)
            guest = _Guest(connection, host)
            self._guests.append(guest)
            self._selector.register(connection, selectors.EVENT_READ, guest)
            guest.tell(NAME)

    def _dismiss(self, guest: _Guest) -> None:
        self._guests.remove(guest)
        self._selector.unregister(guest.connection)
        guest.connection.close()

    def _dismiss_silent(self) -> None:
        latest = time.monotonic() - GREETING_SECONDS
        for guest in list(self._guests):
            if guest.index is None and guest.came_at < latest:
                self._dismiss(guest)

    def _hear(self, guest: _Guest) -> None:
        try:
            part = guest.connection.recv(MOST_BYTES)
        except OSError:
            part = b""
        guest.said += part
        if not part or len(guest.said) > MOST_BYTES:
            self._dismiss(guest)

    def _introduce(self, guest: _Guest) -> None:
        try:
            name, *numbers = guest.said.decode().split()
            index, count, guest.pid, checksum = map(int, numbers)
        except ValueError:
            name, index, count, checksum = "", 0, 0, 0
        if name != NAME or index not in range(count):
            self._dismiss(guest)
            return
        earlier = self._there().get(index)
        if earlier is not None and earlier.is_gone():
            self._dismiss(earlier)
            earlier = None
        guest.index = index
        if count != self._count:
            self._refuse(
                f"The chief counts {self._count} workers, worker {index} ({guest}) "
                f"counts {count}.",
                _COUNT_FIX,
            )
        own = _checksum(self._membership)
        if own and checksum and own != checksum:
            self._refuse(
                f"Worker {index} ({guest}) has another list of workers than the chief, "
                f"which has {', '.join(self._membership.workers)}.",
                _COUNT_FIX,
            )
        if index == 0 or earlier is not None:
            self._refuse(
                f"Two workers have come with the index {index}: "
                f"{earlier or 'the chief'} and {guest}.",
                _INDEX_FIX,
            )

    def _refuse_missing(self, seconds: float) -> NoReturn:
        there = self._there()
        missing = [f"worker {i}" for i in range(1, self._count) if i not in there]
        self._refuse(
            f"{len(there) + 1} of {self._count} workers have arrived within "
            f"{seconds:g} seconds; missing: {', '.join(missing)}.",
            _MISSING_FIX,
        )

    def _refuse(self, what: str, fix: str) -> NoReturn:
        told = list(self._guests)
        end = time.monotonic() + _FAREWELL_SECONDS
        while True:
            for guest in told:
                guest.tell(json.dumps([what, fix]))
            left = end - time.monotonic()
            if left <= 0:
                raise errors.ClusterStartError(self._membership.coordinator, what, fix)
            told = self._look(left)
