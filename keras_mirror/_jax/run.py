"""`strategy.run`, `reduce` and `gather`: custom loops, one call per replica."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from keras_mirror import _context, errors
from keras_mirror._jax.compat import shard_map
from keras_mirror._jax.mesh import AXIS


@jax.tree_util.register_dataclass
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
        return tuple(self.stacked[i] for i in range(self.stacked.shape[0]))

    def __repr__(self) -> str:
        return f"PerReplica({list(self.values)!r})"


def _is_per_replica(value: Any) -> bool:
    return isinstance(value, PerReplica)


def _is_by_rows(leaf: Any, mesh: Mesh) -> bool:
    sharding = getattr(leaf, "sharding", None)
    return (
        isinstance(sharding, NamedSharding)
        and sharding.mesh == mesh
        and len(sharding.spec) > 0
        and sharding.spec[0] == AXIS
    )


def run(
    mesh: Mesh, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls `fn` once per replica; see `Strategy.run`."""
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_per_replica)
    arrays, specs, traced = [], [], []
    for leaf in leaves:
        is_array = _is_per_replica(leaf) or hasattr(leaf, "dtype")
        traced.append(is_array)
        if not is_array:
            continue
        whole = not _is_per_replica(leaf) and not _is_by_rows(leaf, mesh)
        arrays.append(leaf)
        specs.append(P() if whole else P(AXIS))

    def local(*parts: Any) -> Any:
        given = iter(parts)
        own = [
            next(given) if is_array else leaf
            for leaf, is_array in zip(leaves, traced, strict=True)
        ]
        own = [x.stacked[0] if _is_per_replica(x) else x for x in own]
        own_args, own_kwargs = jax.tree.unflatten(structure, own)
        here = _context.ReplicaContext(jax.lax.axis_index(AXIS), mesh.size, AXIS)
        with _context.replica(here):
            result = fn(*own_args, **own_kwargs)
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], result)

    mapped = shard_map(
        local, mesh=mesh, in_specs=tuple(specs), out_specs=P(AXIS), check_vma=False
    )
    return jax.tree.map(PerReplica, jax.jit(mapped)(*arrays))


def _each(method: str, function: Callable[[jax.Array], Any], value: Any) -> Any:
    def apply(leaf: Any) -> Any:
        if not _is_per_replica(leaf):
            raise errors.PerReplicaValueError(
                method,
                "it takes what `strategy.run` returned (a PerReplica, or a nest of "
                f"them). Received: {leaf!r} of type {type(leaf).__name__}.",
            )
        return function(leaf.stacked)

    return jax.tree.map(apply, value, is_leaf=_is_per_replica)


def reduce(op: str, value: Any, axis: int | None) -> Any:
    """Sums or averages over replicas; see `Strategy.reduce`."""
    axes = (0,) if axis is None else (0, axis + 1 if axis >= 0 else axis)
    function = jnp.sum if op == "sum" else jnp.mean
    return _each("reduce", lambda stacked: function(stacked, axis=axes), value)


def gather(value: Any, axis: int) -> Any:
    """Concatenates over replicas; see `Strategy.gather`."""

    def join(stacked: jax.Array) -> jax.Array:
        if stacked.ndim < 2:
            raise errors.PerReplicaValueError(
                "gather",
                "a scalar per replica has no axis to concatenate along. Received: "
                f"values of shape {stacked.shape[1:]}. Use strategy.reduce.",
            )
        return jnp.concatenate(list(stacked), axis=axis)

    return _each("gather", join, value)
