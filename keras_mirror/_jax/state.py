"""Where variables and step state live: moving them onto a mesh and back."""

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from keras_mirror._jax import processes
from keras_mirror._jax.copies import from_whole, lifted, lowered, replicate
from keras_mirror._jax.mesh import (
    at_home,
    is_ours,
    replicated_at_home,
    spans_processes,
)
from keras_mirror._jax.sharded import Layout
from keras_mirror._jax.whole import Whole

# What Keras gets to see of the value at a place of a part.
_See = Callable[[int, jax.Array], jax.Array]


class Part(Sequence[jax.Array]):
    """One part of a step's state: the values of some variables, in order.

    Keras keeps the parts as an attribute of the model while it trains. It wraps a
    list that it is given so, element by element and at every step; this it takes
    as it is.

    Args:
        values: As the step takes them.
        see: What Keras gets to see; None where it is the values themselves.
    """

    def __init__(self, values: list[jax.Array], see: _See | None):
        self.values = values
        self._see = see

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        value = self.values[index]
        return value if self._see is None else self._see(index, value)

    def __iter__(self) -> Iterator[jax.Array]:
        return map(self.__getitem__, range(len(self)))


class PlacedState(tuple[Part, ...]):
    """A step's state whose arrays are known to lie where the step wants them.

    Keras passes the state of one step on to the next as it came; the type spares
    looking at each array again.

    Attributes:
        whole: What puts the values together that processes have parts of, else None.
    """

    whole: Whole | None = None

    def lists(self) -> tuple[list[jax.Array], ...]:
        """The values as the compiled step takes them."""
        return tuple(part.values for part in self)

    def is_there(self, part: int, place: int) -> bool:
        """Whether a step has not taken and kept the value."""
        return not self[part].values[place].is_deleted()


def on_one_device(state: "PlacedState", data: Any, mesh: Mesh) -> tuple[Any, Any]:
    """A step's state and its batch, whole on the first device of this process."""
    if spans_processes(mesh):
        data = jax.tree.map(lambda v: lowered(v, mesh), replicate(data, mesh))
    seen = tuple(list(part) for part in state)
    return jax.device_put((seen, data), at_home(mesh).devices.flat[0])


def placed(state: Any, layout: Layout) -> PlacedState:
    """Marks the state that a step has returned."""
    if isinstance(state, PlacedState):
        return state
    lists = [list(part) for part in state]
    if layout.home is not None or not spans_processes(layout.mesh):
        return PlacedState(Part(values, None) for values in lists)
    if layout.at_rest is not None:
        whole = Whole(lists, layout.at_rest)
        found = PlacedState(Part(v, whole.of_part(k)) for k, v in enumerate(lists))
        found.whole = whole
        return found
    # Keras gets to see what this process has of the values.
    return PlacedState(
        Part(values, lambda _, value: lowered(value, layout.mesh)) for values in lists
    )


def place_state(state: Any, layout: Layout) -> PlacedState:
    """The state with every array where the layout has it."""
    if isinstance(state, PlacedState):
        return state
    mesh = layout.mesh
    if layout.at_rest is not None:
        shardings = layout.of_state([len(part) for part in state])
        return PlacedState(
            _parted(list(part), of_part)
            for part, of_part in zip(state, shardings, strict=True)
        )
    if layout.is_split or layout.home is not None:
        shardings = layout.at_home().of_state([len(part) for part in state])
        parts = [
            _laid_out(list(part), of_part)
            for part, of_part in zip(state, shardings, strict=True)
        ]
        parts = _each_its_own(parts)
        if layout.home is None and spans_processes(mesh):
            parts = [[lifted(value, mesh) for value in part] for part in parts]
        return placed(parts, layout)
    return placed([place_values(list(part), mesh) for part in state], layout)


def _parted(whole: list[jax.Array], shardings: list[NamedSharding]) -> Part:
    """Values that this process has whole, and of which it keeps its parts."""
    values = [from_whole(v, s) for v, s in zip(whole, shardings, strict=True)]
    return Part(values, lambda place, _: whole[place])


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


def references(variables: Iterable[Any]) -> dict[int, Any]:
    """The arrays that variables hold, weakly, by the variable's id."""
    return {id(v): weakref.ref(value) for v, value in _values(variables)}


def set_anew(
    groups: list[list[Any]], values: Any, handed_out: dict[int, Any]
) -> list[list[Any]]:
    """Part, place and path of the variables whose values are not those handed out."""
    return [
        [k, place, variable.path]
        for k, (variables, part) in enumerate(zip(groups, values, strict=True))
        for place, (variable, value) in enumerate(zip(variables, part, strict=True))
        if id(variable) in handed_out and handed_out[id(variable)]() is not value
    ]


def digest(state: Any, places: list[Any]) -> str:
    """A checksum of the values of a state at these parts and places."""
    found = hashlib.blake2b(digest_size=8)
    for k, place in places:
        found.update(np.ascontiguousarray(np.asarray(state[k][place])).tobytes())
    return found.hexdigest()


def take_from_chief(variables: Iterable[Any]) -> None:
    """Gives every worker the chief's values of these variables."""
    pairs = _values(variables)
    own = [np.asarray(value) for _, value in pairs]
    names = [variable.path for variable, _ in pairs]
    values = processes.from_chief(own, names)
    for (variable, old), value in zip(pairs, values, strict=True):
        variable.assign(jax.device_put(value, old.sharding))
