"""The processes of a cluster: meeting, agreeing, and starting from one state."""

import atexit
import contextlib
import functools
import itertools
import json
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import jax
import numpy as np

from keras_mirror import _seeds, errors
from keras_mirror._context import name_of_call
from keras_mirror._jax import chief_watch, compat, turns
from keras_mirror._jax.mesh import WORKER, from_own_rows, mesh_of, replicated
from keras_mirror.cluster.rendezvous import meet

# How long a worker waits for the others at one place of the program.
LATE_SECONDS = 60.0
_FAILED = "failed"
_ENDED = "the end of the program"
# Each request to the store costs some 0.2 ms: what was read is deleted in blocks.
_BLOCK = 64
_numbers = itertools.count()
# A worker looks at a variable of which others have parts.
_LOOK = "a look at the variables"
_state_numbers = itertools.count()
_shared: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
# The options of the runtime, where this module has initialized it.
_joined_with: dict[str, Any] = {}


def join(
    membership: Any,
    *,
    timeout_seconds: int,
    heartbeat_seconds: int,
    runtime_options: Mapping[str, Any],
) -> None:
    """Meets the other workers, or adopts a runtime that is there already.

    Args:
        membership: `keras_mirror.cluster.Membership`, or None without a cluster.
        timeout_seconds: How long to wait for the others.
        heartbeat_seconds: After how long a silent worker counts as dead.
        runtime_options: Further arguments of `jax.distributed.initialize`.

    Raises:
        RuntimeOptionError: This JAX has no such option.
        ClusterStartError: JAX was used before, or the workers did not meet.
    """
    compat.check_runtime_options(runtime_options)
    if jax.distributed.is_initialized():
        _check_adopted(membership, runtime_options)
        _attend(heartbeat_seconds)
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
    if membership.coordinator is not None:
        meet(membership, timeout_seconds=timeout_seconds)
    try:
        compat.initialize(
            membership, timeout_seconds, heartbeat_seconds, runtime_options
        )
    except Exception as error:
        raise errors.ClusterStartError(
            membership.coordinator,
            f"{membership.num_workers or 'all'} workers must meet there within "
            f"{timeout_seconds} seconds; this is number {membership.index}. "
            f"({str(error).splitlines()[0]})",
            "See that every worker is started, that the address is the chief's and "
            "can be reached, and that the port is free.",
        ) from error
    _joined_with.update(runtime_options)
    _attend(heartbeat_seconds)


@functools.cache  # a program may make several strategies
def _attend(heartbeat_seconds: int) -> None:
    chief_watch.start(heartbeat_seconds)
    _tell_uncaught()
    atexit.register(_tell_end)  # after JAX's own, and so called before it


def _check_adopted(membership: Any, runtime_options: Mapping[str, Any]) -> None:
    for option, value in runtime_options.items():
        if option not in _joined_with or _joined_with[option] != value:
            raise errors.RuntimeOptionError(
                option,
                jax.__version__,
                "This process has joined its cluster already, without that one.",
                "Give it where the runtime is initialized first.",
            )
    if membership is None or membership.num_workers is None:
        return
    found = (jax.process_count(), jax.process_index())
    asked = (membership.num_workers, membership.index)
    chief = str(compat.coordinator_address())
    port = chief.rpartition(":")[2]
    said = None
    if membership.is_explicit and membership.workers[0].rpartition(":")[2] != port:
        said = f"This process is in a cluster already, whose chief is at {chief}."
    elif found != asked:
        said = (
            f"This process is worker {found[1]} of {found[0]} already, and cannot be "
            f"worker {asked[1]} of {asked[0]} (by {membership.source}) as well."
        )
    if said is not None:
        raise errors.ClusterStartError(
            membership.coordinator,
            said,
            "Leave out the argument `cluster`, or start a new process.",
        )


def _folder(block: int, index: int) -> str:
    return f"keras_mirror/{block}/{index}"


def _key(number: int, index: int) -> str:
    return f"{_folder(number // _BLOCK, index)}/{number}"


def _tell(number: int, what: str, value: Any, *, again: bool = False) -> str:
    key = _key(number, jax.process_index())
    text = json.dumps([what, value])
    compat.client().key_value_set(key, text, again)
    return text


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def exchange(value: Any, what: str) -> list[Any]:
    """Tells every worker a small value, and hears theirs.

    Every worker must come here equally often, in the same order.

    Args:
        value: Anything that JSON can hold.
        what: What is agreed on; all must name the same.

    Returns:
        The values of all workers, by index, as JSON gives them back.

    Raises:
        LateWorkerError: A worker did not come within LATE_SECONDS; it is named.
        WorkerFailedError: A worker has told the others that it failed.
        WorkersDifferError: A worker came for something else.
    """
    told = _meet(value, what)
    while looks := [number for said, number in told if said == _LOOK]:
        _take_part(looks[0])
        told = _meet(value, what)
    _check_place([said for said, _ in told])
    return [other for _, other in told]


def _check_place(places: list[str]) -> None:
    if len(set(places)) > 1:
        raise errors.WorkersDifferError("place of the program", places)


def _meet(value: Any, what: str) -> list[Any]:
    """Where each worker is, and what it says there."""
    number = next(_numbers)
    said = _tell(number, what, value)
    told = _hear(number, what, said)
    for index, (said, other) in enumerate(told):
        if said == _FAILED:
            raise errors.WorkerFailedError(index, other)
    places = [said for said, _ in told]
    if _ENDED in places:  # nobody waits for these any more
        _check_place(places)
    # Whoever is here has read all that was said at the places before.
    if number and number % _BLOCK == 0:
        folder = _folder(number // _BLOCK - 1, jax.process_index())
        compat.client().key_value_delete(folder)
    return told


def share(state: Any) -> int:
    """Lets other workers look at a state of which each has a part.

    Args:
        state: Its method `put_together` runs collectives.

    Returns:
        Its number: states are made in the same order on all workers.
    """
    number = next(_state_numbers)
    _shared[number] = state
    return number


def put_together(number: int) -> None:
    """Puts a shared state together, with all workers.

    Those that are elsewhere take part where they next wait for the others.

    Raises:
        LateWorkerError, WorkerFailedError: As for `exchange`.
        WorkersDifferError: A worker has no such state, or looks at another.
    """
    _meet(number, _LOOK)
    _take_part(number)


def _take_part(number: int) -> None:
    own = number if number in _shared else None
    told = [other for _, other in _meet(own, "the parts of a state")]
    if any(other != number for other in told):
        raise errors.WorkersDifferError("state that they look at", told)
    _shared[number].put_together()


def _hear(number: int, what: str, own: str) -> list[Any]:
    """What each worker has said; `own` is what this one has, and need not fetch."""
    client, count, me = compat.client(), jax.process_count(), jax.process_index()
    deadline = time.monotonic() + LATE_SECONDS
    found: list[Any] = []
    late: list[int] = []
    for index in range(count):
        if index == me:
            found.append(json.loads(own))
            continue
        left = max(0.05, deadline - time.monotonic())
        try:
            text = client.blocking_key_value_get(_key(number, index), int(1000 * left))
        except Exception:  # noqa: BLE001  jaxlib has no type of its own for it
            late.append(index)
            continue
        found.append(json.loads(text))
    if late:
        error = errors.LateWorkerError(what, late, count, LATE_SECONDS)
        # Who comes later must not go on alone.
        _tell(number, _FAILED, _in_words(error), again=True)
        raise error
    return found


def tell_failure(error: BaseException) -> None:
    """Lets the others know, at their next place of agreement, that this one failed."""
    _tell(next(_numbers), _FAILED, _in_words(error))


def _tell_end() -> None:
    """Lets those who go on know that this process does not."""
    with contextlib.suppress(Exception):
        _tell(next(_numbers), _ENDED, None)


def _tell_uncaught() -> None:
    """Lets the others know of an error that ends this process.

    Otherwise it waits for them at its end, and they for it in the middle.
    """
    before = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        before(kind, error, trace)
        with contextlib.suppress(Exception):
            tell_failure(error)

    sys.excepthook = hook


def gather(array: np.ndarray) -> np.ndarray:
    """Every worker's array on every worker: [...] -> [workers, ...].

    Args:
        array: The same shape and dtype on every worker.
    """
    return _over_workers(array, _all)


def _all(values: jax.Array) -> jax.Array:
    return values


def _chiefs(values: jax.Array) -> jax.Array:
    return values[0]


def _over_workers(
    array: np.ndarray, function: Callable[[jax.Array], jax.Array]
) -> np.ndarray:
    # JAX's own multihost_utils asks for as many devices in each process.
    first = {device.process_index: device for device in reversed(jax.devices())}
    chosen = [first[index] for index in sorted(first)]
    mesh = mesh_of(chosen, (-1,), (WORKER,))
    values = from_own_rows(array[None], mesh, mesh.size)
    program = jax.jit(function, out_shardings=replicated(mesh))
    return np.asarray(turns.take(program, values).addressable_data(0))


def from_chief(arrays: list[np.ndarray], names: list[str]) -> list[np.ndarray]:
    """The chief's values of these arrays, on every worker.

    Args:
        arrays: The same shapes and dtypes on every worker.
        names: What each is called, for errors.
    """
    # Before all enter a collective, in which nobody could say who is missing.
    what = f"the chief's variables, for `{name_of_call() or 'compile'}`"
    kinds = exchange([[a.shape, str(a.dtype)] for a in arrays], what)
    if any(other != kinds[0] for other in kinds):
        words = exchange(_first_unlike(arrays, names, kinds), "their names")
        raise errors.WorkersDifferError("variables", words)
    parts = [np.ascontiguousarray(array).view(np.uint8).ravel() for array in arrays]
    sent = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
    received = _over_workers(sent, _chiefs)
    found, start = [], 0
    for array, part in zip(arrays, parts, strict=True):
        piece = received[start : start + part.size]
        found.append(piece.view(array.dtype).reshape(array.shape))
        start += part.size
    return found


def _first_unlike(arrays: list[np.ndarray], names: list[str], kinds: list[Any]) -> str:
    """Which variable is not the same kind on all workers, as this one has it."""
    alike = itertools.takewhile(
        lambda row: all(kind == row[0] for kind in row), zip(*kinds, strict=False)
    )
    place = len(list(alike))
    has = "no more"
    if place < len(arrays):
        array = arrays[place]
        has = f"{names[place]!r}, {array.dtype}{list(array.shape)}"
    return f"{len(arrays)} variables, of which number {place + 1} is {has}"


def share_random_state() -> None:
    """Gives every worker the chief's state of the host's random generators.

    Keras and torch draw from them the order in which a fit takes its rows.
    """
    own = _seeds.host_state() if jax.process_index() == 0 else None
    what = f"the state of random generators, for `{name_of_call()}`"
    _seeds.set_host_state(exchange(own, what)[0])
