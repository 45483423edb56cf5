"""Looks at what JAX does and holds: compilations, live arrays, collectives."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax

from keras_mirror._jax.report import count

BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
_durations: list[float] = []


def _listen(event: str, duration: float, **_: object) -> None:
    if event == BACKEND_COMPILE:
        _durations.append(duration)


jax.monitoring.register_event_duration_secs_listener(_listen)


@dataclass
class Compilations:
    """XLA compilations within a block.

    Attributes:
        number: how many programs were compiled.
        seconds: time that XLA took for them, all together.
    """

    number: int = 0
    seconds: float = 0.0


@contextmanager
def compilations() -> Iterator[Compilations]:
    """Counts the compilations of the block; the yielded object is filled at its end."""
    found, start = Compilations(), len(_durations)
    try:
        yield found
    finally:
        found.number = len(_durations) - start
        found.seconds = sum(_durations[start:])


class LiveBytes:
    """The most bytes of live arrays on any one device, beyond those at the start.

    Args:
        devices: the devices to look at.
    """

    def __init__(self, devices: list[jax.Device]):
        self._devices = devices
        self._before = _bytes_by_device()
        self.most = 0

    def look(self) -> None:
        now = _bytes_by_device()
        grown = max(now[device] - self._before[device] for device in self._devices)
        self.most = max(self.most, grown)


def _bytes_by_device() -> Counter[jax.Device]:
    held: Counter[jax.Device] = Counter()
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return held


@dataclass(frozen=True)
class Traffic:
    """What one compiled step sends between devices.

    Attributes:
        collectives: number of collective operations.
        bytes_sent: bytes that each device sends.
    """

    collectives: int
    bytes_sent: int


def traffic(lowered: jax.stages.Lowered, num_devices: int) -> Traffic:
    """Counts the collectives of a lowered step, once XLA has merged them."""
    return Traffic(*count(lowered.compile().as_text() or "", num_devices))
