"""The one place that knows differences between JAX versions."""

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from keras_mirror import errors

shard_map = jax.shard_map


def bound_axes() -> tuple[str, ...]:
    """Names of the axes that `shard_map` or `pmap` has bound here."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == AxisType.Manual)


def is_bound(axis_name: str | tuple[str, ...]) -> bool:
    """Whether a mapping over this axis is being traced, one by `vmap` included."""
    try:
        jax.lax.axis_size(axis_name)
    except NameError:
        return False
    return True


def own_mesh(mesh: Mesh) -> contextlib.AbstractContextManager[object]:
    """Puts `mesh` in the place of one that the user has set, if any.

    Under a mesh with explicit axes JAX asks every operation for the layout of its
    result on that mesh.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.set_mesh(mesh)


def backends_are_initialized() -> bool:
    """Whether JAX has looked for its devices, after which no cluster can be joined."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def client() -> Any:
    """The client of JAX's coordination service, which has a key-value store.

    None before this process has joined a cluster, and after it has left.
    """
    from jax._src import distributed

    return distributed.global_state.client


def coordinator_address() -> str | None:
    """Where this process found that service."""
    from jax._src import distributed

    return distributed.global_state.coordinator_address


def process_count() -> int:
    """How many processes have joined; 1 without looking for devices where none."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def goes_by_gloo() -> bool:
    """Whether collectives of CPU devices are gloo's, also those within a process."""
    return jax.distributed.is_initialized() and jax.default_backend() == "cpu"


# What the strategy says itself, by an argument of its own.
# How long who has ended waits for the others, since JAX ends all together. They may
# have work of their own to do; whether they live, the heartbeat says.
_SHUTDOWN_SECONDS = 7 * 24 * 60 * 60
_SAID_BY = {
    "coordinator_address": "cluster",
    "num_processes": "cluster",
    "process_id": "cluster",
    "initialization_timeout": "timeout_seconds",
    "heartbeat_timeout_seconds": "heartbeat_seconds",
}


def check_runtime_options(options: Mapping[str, Any]) -> None:
    """Refuses what this JAX' `jax.distributed.initialize` cannot be given.

    Raises:
        RuntimeOptionError: It has no such option, or the strategy gives it.
    """
    known = inspect.signature(jax.distributed.initialize).parameters
    for option in options:
        if option in _SAID_BY:
            why = "That one is the strategy's to give."
            fix = f"Use the argument `{_SAID_BY[option]}`."
        elif option not in known:
            why = "This version has no such option."
            free = (name for name in known if name not in _SAID_BY)
            fix = f"It has {', '.join(free)}. (JAX 0.12 and newer have mtls_*.)"
        else:
            continue
        raise errors.RuntimeOptionError(option, jax.__version__, why, fix)


def initialize(
    membership: Any,
    timeout_seconds: int,
    heartbeat_seconds: int,
    options: Mapping[str, Any],
) -> None:
    """Joins the cluster; `options` win over what is said here."""
    own = {
        "coordinator_address": membership.coordinator,
        "num_processes": membership.num_workers,
        "process_id": membership.index,
        "initialization_timeout": timeout_seconds,
        "heartbeat_timeout_seconds": heartbeat_seconds,
        "shutdown_timeout_seconds": _SHUTDOWN_SECONDS,
    }
    if membership.index == 0 and membership.coordinator is not None:
        # That interface, not all of them.
        own["coordinator_bind_address"] = membership.coordinator
    # It would take SIGTERM from the program, and from what the program starts.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(**own | dict(options))


def _varying(value: object) -> frozenset[str]:
    kind = jax.typeof(value)
    manual = getattr(kind, "manual_axis_type", None)  # JAX >= 0.10
    if manual is not None:
        return frozenset(manual.varying)
    return frozenset(getattr(kind, "vma", ()))


def is_already_summed(value: object, axis_name: str | tuple[str, ...]) -> bool:
    """Whether a gradient of replicated weights is a sum over the axis already.

    Under shard_map's default `check_vma=True` JAX sums such gradients itself; the
    type of the value then says that it does not vary over the axis. Without the
    check nothing is tracked, and nothing has been summed.
    """
    names = {axis_name} if isinstance(axis_name, str) else set(axis_name)
    is_tracked = names <= _varying(jax.lax.axis_index(axis_name))
    return is_tracked and not names & _varying(value)
