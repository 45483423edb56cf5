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

from keras_mirror import _context, errors
from keras_mirror._jax import random
from keras_mirror._jax.batch import everywhere
from keras_mirror._jax.collectives import combine, entering, is_float, sum_and_mean
from keras_mirror._jax.compat import own_mesh, shard_map
from keras_mirror._jax.mesh import by_rows, is_ours, replica_axis, spans_processes
from keras_mirror._jax.state import lowered, replicate
from keras_mirror._seeds import is_seed

# A function may build a layer in each of its first passes, if not for ever.
_MOST_PASSES = 5


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


class _Recording(keras.StatelessScope):
    """Collects what the code of one replica assigns to Keras variables.

    Values assigned inside a traced program are not values outside of it; they
    leave it as results, put together as in a step's replica view.
    """

    def __init__(self, replica_id: jax.Array, mesh: Mesh):
        super().__init__()
        self._replica_id = replica_id
        self._mesh = mesh
        # Values of this process cannot enter a program of all, constants can.
        self._as_constants = spans_processes(mesh)
        self.updates: dict[int, tuple[Any, jax.Array]] = {}
        # Variables that a layer made in here: they have no values yet.
        self.made: list[Any] = []

    def add_update(self, update: tuple[Any, jax.Array]) -> None:
        super().add_update(update)
        self.updates[id(update[0])] = update

    def get_current_value(self, variable: Any) -> Any:
        found = super().get_current_value(variable)
        if found is None and variable._value is None:
            self.made.append(variable)
            return None  # Keras puts its first value there
        if found is not None:
            return found
        value = variable._value
        if self._as_constants:
            value = jnp.asarray(np.asarray(value))
        if is_seed(variable):
            return random.fold_in(value, self._replica_id)
        if variable.aggregation == "sum":
            return entering(value, "sum", self._replica_id)
        return value if self._as_constants else None

    def merged(self) -> list[jax.Array]:
        """The new values of the assigned variables, equal on all replicas."""
        means: dict[str, Any] = {}
        sums: dict[str, Any] = {}
        for i, (variable, new) in enumerate(self.updates.values()):
            if is_seed(variable):
                means[str(i)] = random.fold_out(new, self._replica_id)
                continue
            how, value = combine(new, variable.aggregation, self._replica_id)
            (means if how == "mean" else sums)[str(i)] = value
        seeds = {k: means.pop(k) for k in list(means) if not is_float(means[k])}
        sums, means = sum_and_mean(
            sums, means, replica_axis(self._mesh), self._mesh.size
        )
        values = {**seeds, **sums, **means}
        return [values[str(i)] for i in range(len(self.updates))]


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


def _as_result(leaf: Any) -> jax.Array:
    if not hasattr(leaf, "dtype") and not isinstance(leaf, (int, float, complex)):
        raise errors.PerReplicaValueError(
            "run",
            "the function must return arrays, numbers or nests of them. Received: "
            f"{leaf!r} of type {type(leaf).__name__}.",
        )
    return jnp.asarray(leaf)[None]


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
    axis = replica_axis(mesh)
    assigned: list[Any] = []
    made: list[Any] = []

    def local(*parts: Any) -> Any:
        own = list(leaves)
        for place, part in zip(places, parts, strict=True):
            own[place] = part[0] if isinstance(leaves[place], PerReplica) else part
        own_args, own_kwargs = structure.unflatten(own)
        here = _context.ReplicaContext(jax.lax.axis_index(axis), mesh.size, axis)
        with _context.replica(here), _Recording(here.replica_id, mesh) as recording:
            result = fn(*own_args, **own_kwargs)
        made[:] = recording.made
        if made:
            return None, []
        assigned[:] = [variable for variable, _ in recording.updates.values()]
        return jax.tree.map(_as_result, result), recording.merged()

    def call() -> Any:
        mapped = shard_map(
            lambda *parts: local(*parts),  # a function that JAX has not traced yet
            mesh=mesh,
            in_specs=tuple(specs),
            out_specs=(P(axis), P()),
            check_vma=False,
        )
        # What a layer makes when it is first called gets its values at the end of
        # the outermost scope, which must lie outside of the traced program.
        with keras.StatelessScope():
            return jax.jit(mapped)(*arrays)

    with own_mesh(mesh):
        for _ in range(_MOST_PASSES):
            result, values = call()
            if not made:
                break
    if made:
        raise errors.RunArgumentError(
            f"The function makes variables at every call ({made[0].path} is one); "
            "make them outside, or once.",
            fn,
        )
    for variable, value in zip(assigned, values, strict=True):
        if spans_processes(mesh):
            value = lowered(value, mesh)
        variable.assign(value)
    return jax.tree.map(PerReplica, result)


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
