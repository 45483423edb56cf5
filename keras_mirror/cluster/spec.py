"""A cluster as a user writes it down, and what a process knows of its own."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from keras_mirror import errors

_PORTS = range(1, 65536)
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.%\w]+\]|[^\s/:\[\]]+):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True)
class Membership:
    """This process' place among the workers.

    Attributes:
        coordinator: "host:port" where worker 0 waits for the others. None where
            the scheduler lets JAX find it.
        num_workers: How many processes train together. None where JAX finds it.
        index: This process, 0 being the chief. None where JAX finds it.
        source: Where this was found, in words.
        workers: Addresses of all workers, where they are known.
        is_explicit: Whether the user has passed it.
    """

    coordinator: str | None
    num_workers: int | None
    index: int | None
    source: str
    workers: tuple[str, ...] = ()
    is_explicit: bool = False


def is_address(value: object) -> bool:
    """Whether it is "host:port" or "[v6]:port"."""
    found = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    return found is not None and int(found["port"]) in _PORTS


def check_address(value: object, field: str, source: str) -> str:
    """An address "host:port" or "[v6]:port".

    Raises:
        ClusterSpecError: It is none; the error names `field`.
    """
    if is_address(value):
        return str(value)
    raise errors.ClusterSpecError(
        source, field, value, 'It must be an address such as "10.0.0.1:12345".'
    )


def check_addresses(values: object, field: str, source: str) -> tuple[str, ...]:
    """A list of addresses, each there once.

    Raises:
        ClusterSpecError: It is none, is empty, or has an address twice.
    """
    if not isinstance(values, (list, tuple)) or not values:
        raise errors.ClusterSpecError(
            source, field, values, "It must be a list of addresses, not empty."
        )
    found: list[str] = []
    for i, value in enumerate(values):
        address = check_address(value, f"{field}[{i}]", source)
        if address in found:
            raise errors.ClusterSpecError(
                source, f"{field}[{i}]", value, "Each worker needs its own address."
            )
        found.append(address)
    return tuple(found)


def check_index(value: object, count: int, field: str, source: str) -> int:
    """The index of one of `count` processes.

    Raises:
        ClusterSpecError: It is no integer, or out of range.
    """
    try:
        index = int(value) if not isinstance(value, bool) else -1  # pyright: ignore
    except (TypeError, ValueError):
        index = -1
    if index not in range(count) or str(index) != str(value):
        raise errors.ClusterSpecError(
            source, field, value, f"It must be an integer from 0 to {count - 1}."
        )
    return index


@dataclass(frozen=True)
class ClusterSpec:
    """The workers of a cluster, written down.

    Every process gets the same `workers` and an `index` of its own.

    Args:
        workers: Addresses "host:port", one a process, the chief's first. The
            workers meet at the chief's.
        index: Which of them this process is.

    Raises:
        ClusterSpecError: An address is malformed or there twice, or `index` is out
            of range. The error names the field.

    Example:

    ```python
    cluster = km.ClusterSpec(workers=["10.0.0.1:9000", "10.0.0.2:9000"], index=0)
    strategy = km.MultiWorkerMirroredStrategy(cluster)
    ```
    """

    workers: Sequence[str]
    index: int

    def __post_init__(self) -> None:
        source = "ClusterSpec"
        workers = check_addresses(self.workers, "workers", source)
        object.__setattr__(self, "workers", workers)
        index = check_index(self.index, len(workers), "index", source)
        object.__setattr__(self, "index", index)

    def membership(self) -> Membership:
        """What this process knows of its place."""
        workers = tuple(self.workers)
        return Membership(
            workers[0],
            len(workers),
            self.index,
            "the argument `cluster`",
            workers,
            is_explicit=True,
        )
