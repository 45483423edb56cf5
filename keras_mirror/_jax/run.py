"""`strategy.run`, `reduce` and `gather`: custom loops, one call per replica."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from keras_mirror import errors
from keras_mirror._jax import programs, turns
from keras_mirror._jax.batch import everywhere
from keras_mirror._jax.compat import own_mesh
from keras_mirror._jax.copies import lowered, replicate
from keras_mirror._jax.mesh import by_rows, is_ours, replica_axis, spans_processes


def _own_mesh(stacked: jax.Array) -> contextlib.AbstractContextManager[object]:
    sharding = stacked.sharding
    if not isinstance(sharding, NamedSharding):
        return contextlib.nullcontext()
    return own_mesh(sharding.mesh)  # pyright: ignore[reportArgumentType]


def _at_home(stacked: jax.Array) -> jax.Array:
    """All replicas' values, where every worker has them; no change with one."""
    sharding = stacked.sharding
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_addressable:
        return stacked
    mesh: Any = sharding.mesh
    return lowered(replicate(stacked, mesh), mesh)


@dataclass(frozen=True)
class PerReplica:
    """One value per replica.

    Attributes:
        stacked: Array [replicas, ...]; replica i's value lies on its own device.
    """

    stacked: jax.Array

    @property
    def values(self) -> tuple[jax.Array, ...]:
        """The values, in replica order."""
        with _own_mesh(self.stacked):
            stacked = _at_home(self.stacked)
            return tuple(stacked[i] for i in range(stacked.shape[0]))

    def __repr__(self) -> str:
        return f"PerReplica({list(self.values)!r})"


def _is_by_rows(leaf: Any, mesh: Mesh) -> bool:
    sharding = getattr(leaf, "sharding", None)
    return (
        isinstance(sharding, NamedSharding)
        and sharding.mesh == mesh
        and leaf.ndim > 0
        and sharding.is_equivalent_to(by_rows(mesh), leaf.ndim)
    )


def _as_array(leaf: Any) -> Any:
    """The array that an argument stands for, None where it stands for itself."""
    if isinstance(leaf, PerReplica):
        return leaf.stacked
    if isinstance(leaf, keras.Variable):
        return leaf.value
    return leaf if isinstance(leaf, (jax.Array, np.ndarray, np.generic)) else None


def _split(leaves: list[Any], mesh: Mesh) -> tuple[list[Any], list[Any], list[Any]]:
    """Arrays among the arguments, how each is divided, and where they stand."""
    arrays, specs, places = [], [], []
    axis = replica_axis(mesh)
    for place, leaf in enumerate(leaves):
        array = _as_array(leaf)
        if array is None:
            continue
        own = isinstance(leaf, PerReplica)
        sharding = getattr(array, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh != mesh:
            if own or (is_ours(sharding) and not sharding.is_fully_replicated):
                raise errors.RunArgumentError(
                    "Arguments that are divided over replicas must come from the "
                    "same strategy.",
                    sharding,
                )
            array = jax.device_get(array)  # each replica gets it whole
        elif _is_on_other_devices(array, mesh):
            array = jax.device_get(array)
        if spans_processes(mesh) and not _is_by_rows(array, mesh):
            array = everywhere(array, mesh)
        arrays.append(array)
        specs.append(P(axis) if own or _is_by_rows(array, mesh) else P())
        places.append(place)
    return arrays, specs, places


def _is_on_other_devices(array: Any, mesh: Mesh) -> bool:
    if not isinstance(array, jax.Array) or isinstance(array, Tracer):
        return False
    return array.sharding.device_set != set(mesh.devices.flat)


def run(
    mesh: Mesh, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls `fn` once per replica; see `Strategy.run`."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays, specs, places = _split(leaves, mesh)
    if any(isinstance(array, Tracer) for array in arrays):
        raise errors.RunArgumentError(
            "`run` must be called outside of `jax.jit`, where it can be seen which "
            "arrays are divided by rows. Compile a `jax.shard_map` of your own "
            "instead; DistributedOptimizer works in it.",
            fn,
        )
    kinds: list[Any] = [
        None if place in places else programs.Fixed.of(leaf)
        for place, leaf in enumerate(leaves)
    ]
    for place, spec in zip(places, specs, strict=True):
        kinds[place] = programs.Varying(spec, isinstance(leaves[place], PerReplica))
    with own_mesh(mesh):
        program = programs.find(mesh, fn, structure, kinds, arrays)
        spans = spans_processes(mesh)
        found = turns.take(program, arrays) if spans else program(arrays)
        return jax.tree.map(PerReplica, found)


def _each(method: str, function: Callable[[jax.Array], Any], value: Any) -> Any:
    def apply(leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica):
            raise errors.PerReplicaValueError(
                method,
                "it takes what `strategy.run` returned (a PerReplica, or a nest of "
                f"them). Received: a value of type {type(leaf).__name__}.",
            )
        with _own_mesh(leaf.stacked):
            return function(_at_home(leaf.stacked))

    return jax.tree.map(apply, value)


def _check_axis(method: str, axis: int, stacked: jax.Array) -> int:
    """The axis of one replica's value as one of the stacked array."""
    rank = stacked.ndim - 1
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise errors.PerReplicaValueError(
            method,
            f"`axis` must be one of a value of shape {stacked.shape[1:]} on each "
            f"replica. Received: axis={axis!r}.",
        )
    return axis % rank + 1


def reduce(op: str, value: Any, axis: int | None) -> Any:
    """Sums or averages over replicas; see `Strategy.reduce`."""
    function = jnp.sum if op == "sum" else jnp.mean

    def apply(stacked: jax.Array) -> jax.Array:
        if axis is None:
            return function(stacked, axis=0)
        return function(stacked, axis=(0, _check_axis("reduce", axis, stacked)))

    return _each("reduce", apply, value)


def gather(value: Any, axis: int) -> Any:
    """Concatenates over replicas; see `Strategy.gather`."""

    def join(stacked: jax.Array) -> jax.Array:
        place = _check_axis("gather", axis, stacked)
        return jnp.concatenate(list(stacked), axis=place - 1)

    return _each("gather", join, value)
