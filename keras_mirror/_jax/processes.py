"""The processes of a cluster: meeting, agreeing, and starting from one state."""

import itertools
import json
import random
import time
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from keras_mirror import errors
from keras_mirror._jax import compat

# How long a worker waits for the others at one place of the program.
LATE_SECONDS = 60.0
_numbers = itertools.count()


def count() -> int:
    """How many processes train together."""
    return compat.process_count()


def join(membership: Any, *, timeout_seconds: int, heartbeat_seconds: int) -> None:
    """Meets the other workers, or adopts a runtime that is there already.

    Args:
        membership: `keras_mirror.cluster.Membership`, or None without a cluster.
        timeout_seconds: How long to wait for the others.
        heartbeat_seconds: After how long a silent worker counts as dead.

    Raises:
        ClusterStartError: JAX was used before, or the workers did not meet.
    """
    if jax.distributed.is_initialized():
        _check_adopted(membership)
        return
    if membership is None or membership.num_workers == 1:
        return
    if compat.backends_are_initialized():
        raise errors.ClusterStartError(
            membership.coordinator,
            "JAX has run something in this process already, and it must know the "
            "cluster before.",
            "Make the strategy at the top of the program, before the first array, "
            "random number or model.",
        )
    try:
        compat.initialize(membership, timeout_seconds, heartbeat_seconds)
    except Exception as error:
        raise errors.ClusterStartError(
            membership.coordinator,
            f"{membership.num_workers or 'all'} workers must meet there within "
            f"{timeout_seconds} seconds; this is number {membership.index}. "
            f"({str(error).splitlines()[0]})",
            "See that every worker is started, that the address is the chief's and "
            "can be reached, and that the port is free.",
        ) from error


def _check_adopted(membership: Any) -> None:
    found = (jax.process_count(), jax.process_index())
    asked = (
        found
        if membership is None or membership.num_workers is None
        else (membership.num_workers, membership.index)
    )
    if found != asked:
        raise errors.ClusterStartError(
            membership.coordinator,
            f"This process is worker {found[1]} of {found[0]} already, and cannot be "
            f"worker {asked[1]} of {asked[0]} (by {membership.source}) as well.",
            "Leave out the argument `cluster`, or start a new process.",
        )


def exchange(value: Any, what: str, *, late_seconds: float = LATE_SECONDS) -> list[Any]:
    """Tells every worker a small value, and hears theirs.

    Every worker must come here equally often, in the same order.

    Args:
        value: Anything that JSON can hold.
        what: What is agreed on, for the error.

    Returns:
        The values of all workers, by index.

    Raises:
        LateWorkerError: A worker did not come; it is named.
    """
    number, me = next(_numbers), jax.process_index()
    client = compat.client()
    client.key_value_set(f"keras_mirror/{number}/{me}", json.dumps(value))
    deadline = time.monotonic() + late_seconds
    found: list[Any] = []
    late: list[int] = []
    for index in range(jax.process_count()):
        left = max(0.05, deadline - time.monotonic())
        try:
            text = client.blocking_key_value_get(
                f"keras_mirror/{number}/{index}", int(1000 * left)
            )
        except Exception:  # noqa: BLE001  jaxlib has no type of its own for it
            late.append(index)
            continue
        found.append(json.loads(text))
    if late:
        raise errors.LateWorkerError(what, late, jax.process_count(), late_seconds)
    # All have read what was said two places ago.
    if number >= 2:
        client.key_value_delete(f"keras_mirror/{number - 2}/{me}")
    return found


def agree(value: Any, what: str) -> None:
    """Raises WorkersDifferError on every worker unless all bring the same value."""
    values = exchange(value, what)
    if any(other != values[0] for other in values):
        raise errors.WorkersDifferError(what, values)


def from_chief(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """The chief's values of these arrays, on every worker.

    Args:
        arrays: The same shapes and dtypes on every worker.
    """
    parts = [np.ascontiguousarray(array).view(np.uint8).ravel() for array in arrays]
    sent = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
    received = np.asarray(multihost_utils.broadcast_one_to_all(sent))
    received = received.astype(np.uint8)
    found, start = [], 0
    for array, part in zip(arrays, parts, strict=True):
        piece = received[start : start + part.size]
        found.append(piece.view(array.dtype).reshape(array.shape))
        start += part.size
    return found


def share_random_state() -> None:
    """Gives every worker the chief's state of `random` and `numpy.random`.

    Keras draws from them the order in which a fit takes its rows.
    """
    python, numpy = random.getstate(), np.random.get_state(legacy=True)
    keys = np.asarray(numpy[1], np.uint32)
    numbers = np.asarray([numpy[2], numpy[3], *python[1]], np.int64)
    gauss = np.asarray([numpy[4]], np.float64)
    keys, numbers, gauss = from_chief([keys, numbers, gauss])
    np.random.set_state(
        (numpy[0], keys, int(numbers[0]), int(numbers[1]), float(gauss[0]))
    )
    words = tuple(int(word) for word in numbers[2:])
    random.setstate((python[0], words, None))
