"""Where variables and step state live: moving them onto a mesh and back."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from keras_mirror._jax import processes, turns
from keras_mirror._jax.mesh import (
    at_home,
    is_ours,
    replicated,
    replicated_at_home,
    spans_processes,
)
from keras_mirror._jax.sharded import Layout


class Part(Sequence[jax.Array]):
    """One part of a step's state: the values of some variables, in order.

    Keras keeps the parts as an attribute of the model while it trains. It wraps a
    list that it is given so, element by element and at every step; this it takes
    as it is.
    """

    def __init__(self, values: list[jax.Array], mesh: Mesh):
        self.values = values
        # Where other processes have a part of the values, Keras gets to see this
        # one's.
        self._mesh = mesh if spans_processes(mesh) else None

    def _seen(self, value: jax.Array) -> jax.Array:
        return value if self._mesh is None else lowered(value, self._mesh)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> Any:
        found = self.values[index]
        if isinstance(found, list):
            return [self._seen(value) for value in found]
        return self._seen(found)

    def __iter__(self) -> Iterator[jax.Array]:
        return map(self._seen, self.values)


class PlacedState(tuple[Part, ...]):
    """A step's state whose arrays are known to lie where the step wants them.

    Keras passes the state of one step on to the next as it came; the type spares
    looking at each array again.
    """

    def lists(self) -> tuple[list[jax.Array], ...]:
        """The values as the compiled step takes them."""
        return tuple(part.values for part in self)

    def unless_deleted(self) -> list[list[jax.Array | None]]:
        """The values as Keras sees them, None for what a step took and kept."""
        return [
            [None if raw.is_deleted() else part._seen(raw) for raw in part.values]
            for part in self
        ]


def _same_copies(value: jax.Array, mesh: Mesh) -> jax.Array:
    """This process' part of an array as that of one over another mesh; no copy."""
    sharding = replicated(mesh)
    if not value.sharding.is_fully_replicated:
        sharding = NamedSharding(mesh, value.sharding.spec)  # pyright: ignore
    copies = [shard.data for shard in value.addressable_shards]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, copies)


def lifted(value: jax.Array, mesh: Mesh) -> jax.Array:
    """An array that this process has, as its part of one over the whole mesh."""
    return _same_copies(value, mesh)


def lowered(value: jax.Array, mesh: Mesh) -> jax.Array:
    """Undoes `lifted`."""
    return _same_copies(value, at_home(mesh))


@functools.cache
def _replicating(mesh: Mesh) -> Any:
    return jax.jit(lambda values: values, out_shardings=replicated(mesh))


def replicate(values: Any, mesh: Mesh) -> Any:
    """A nest of arrays of any layout over `mesh`, each whole on every device."""
    return turns.take(_replicating(mesh), values)


def on_one_device(state: "PlacedState", data: Any, mesh: Mesh) -> tuple[Any, Any]:
    """A step's state and its batch, whole on the first device of this process."""
    if spans_processes(mesh):
        data = jax.tree.map(lambda v: lowered(v, mesh), replicate(data, mesh))
    seen = tuple(list(part) for part in state)
    return jax.device_put((seen, data), at_home(mesh).devices.flat[0])


def placed(state: Any, mesh: Mesh) -> PlacedState:
    """Marks the state that a step over `mesh` has returned."""
    if isinstance(state, PlacedState):
        return state
    return PlacedState(Part(list(part), mesh) for part in state)


def place_state(state: Any, layout: Layout) -> PlacedState:
    """The state with every array where the layout has it."""
    if isinstance(state, PlacedState):
        return state
    mesh = layout.mesh
    if layout.is_split or layout.home is not None:
        shardings = layout.at_home().of_state([len(part) for part in state])
        parts = [
            _laid_out(list(part), of_part)
            for part, of_part in zip(state, shardings, strict=True)
        ]
        parts = _each_its_own(parts)
        if spans_processes(mesh):
            parts = [[lifted(value, mesh) for value in part] for part in parts]
        return placed(parts, mesh)
    return placed([place_values(list(part), mesh) for part in state], mesh)


def _each_its_own(parts: list[list[jax.Array]]) -> list[list[jax.Array]]:
    """The arrays, copied where two variables share one: a step takes each once.

    A moving average of weights begins as the weights themselves.
    """
    seen: set[int] = set()
    for part in parts:
        for i, value in enumerate(part):
            if id(value) in seen:
                part[i] = value.copy()
            seen.add(id(value))
    return parts


def place_values(values: list[Any], mesh: Mesh) -> list[jax.Array]:
    """Values of variables as a program over `mesh` takes them: replicated."""
    values = _laid_out(values, [replicated_at_home(mesh)] * len(values))
    if spans_processes(mesh):
        values = [lifted(value, mesh) for value in values]
    return values


def _laid_out(values: list[Any], shardings: list[NamedSharding]) -> list[jax.Array]:
    """`values`, those that lie elsewhere moved."""
    away = [i for i, v in enumerate(values) if v.sharding != shardings[i]]
    if away:
        moved = jax.device_put([values[i] for i in away], [shardings[i] for i in away])
        for i, value in zip(away, moved, strict=True):
            values[i] = value
    return values


def model_variables(model: Any) -> list[Any]:
    """All variables that a step of `model` reads or writes, once each."""
    optimizer = getattr(model, "optimizer", None)
    found = list(model.variables)
    found += list(getattr(model, "metrics_variables", []))
    found += list(optimizer.variables) if optimizer is not None else []
    unique = {id(v): v for v in found}
    return list(unique.values())


def _values(variables: Iterable[Any]) -> list[tuple[Any, jax.Array]]:
    # `_value` is None while a variable waits for its initializer (or was handed
    # to a step in progress); `value` would then make one up.
    pairs = ((v, getattr(v, "_value", None)) for v in variables)
    return [(v, value) for v, value in pairs if isinstance(value, jax.Array)]


def spread(variables: list[Any], shardings: list[NamedSharding]) -> None:
    """Lays each variable out as its sharding says."""
    wanted = {id(v): s for v, s in zip(variables, shardings, strict=True)}
    pairs = []
    for variable, value in _values(variables):
        sharding = wanted[id(variable)]
        # A layout given by `keras.distribution` would pull each assigned value
        # back to its own mesh.
        if getattr(variable, "_layout", None) is not None:
            variable._layout = None
        if value.sharding != sharding:
            pairs.append((variable, value, sharding))
    placed = jax.device_put([v for _, v, _ in pairs], [s for _, _, s in pairs])
    for (variable, *_), value in zip(pairs, placed, strict=True):
        variable.assign(value)


def bring_home(variables: Iterable[Any]) -> bool:
    """Moves what a strategy spread, or put on a device of its own, to the default.

    Variables that a `keras.distribution` laid out are left alone.

    Returns:
        Whether there was anything to move.
    """
    away = [
        (variable, value)
        for variable, value in _values(variables)
        if getattr(variable, "_layout", None) is None and is_ours(value.sharding)
    ]
    for variable, value in away:
        # Through the host and uncommitted, as a newly made variable is.
        variable.assign(jax.device_put(jax.device_get(value)))
    return bool(away)


def lay_out(variables: Iterable[Any], distribution: Any) -> None:
    """Gives the variables the layout that a `keras.distribution` wants."""
    for variable, value in _values(variables):
        variable._layout = None
        variable._layout = distribution.get_variable_layout(variable)
        variable.assign(value)


def take_from_chief(variables: Iterable[Any]) -> None:
    """Gives every worker the chief's values of these variables."""
    pairs = _values(variables)
    own = [np.asarray(value) for _, value in pairs]
    for (variable, old), value in zip(pairs, processes.from_chief(own), strict=True):
        variable.assign(jax.device_put(value, old.sharding))
