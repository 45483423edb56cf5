"""A model's variables as a checkpoint has them: arrays over all processes, by place."""

import itertools
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from keras_mirror._jax.copies import from_whole, lifted, lowered, whole_here
from keras_mirror._jax.mesh import in_host_memory, spans_processes
from keras_mirror._jax.sharded import Layout, groups_of, layout_of

_GROUPS = ("trainable", "non_trainable", "optimizer")


def _named(model: Any) -> dict[str, Any]:
    """The variables by group and place: paths have counters that differ by session."""
    return {
        f"{kind}_{place:05d}": variable
        for kind, group in zip(_GROUPS, groups_of(model), strict=False)
        for place, variable in enumerate(group)
    }


def _mesh_of(strategy: Any) -> Any:
    """The mesh of all processes, None where this one has all of it."""
    if strategy is None or not spans_processes(strategy.mesh):
        return None
    return strategy.mesh


def _over_processes(model: Any, strategy: Any) -> Layout | None:
    """The layout where processes have parts of a variable, else None."""
    layout = None if _mesh_of(strategy) is None else layout_of(model, strategy)
    return layout if layout is not None and layout.at_rest is not None else None


def _shardings(model: Any, layout: Layout) -> dict[str, NamedSharding]:
    groups = groups_of(model)
    found = layout.of_state([len(group) for group in groups])
    return dict(zip(_named(model), itertools.chain(*found), strict=False))


def arrays(model: Any, strategy: Any) -> dict[str, jax.Array]:
    """The values, each where it lies."""
    mesh, variables = _mesh_of(strategy), _named(model)
    layout = _over_processes(model, strategy)
    if layout is not None:
        shardings = _shardings(model, layout)
        return {n: from_whole(v.value, shardings[n]) for n, v in variables.items()}
    return {
        name: variable.value if mesh is None else lifted(variable.value, mesh)
        for name, variable in variables.items()
    }


def templates(model: Any, strategy: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape, dtype and layout of each, as it is to be read."""
    layout = _over_processes(model, strategy)
    if layout is None:
        values = arrays(model, strategy)
        shardings = {name: value.sharding for name, value in values.items()}
    else:
        values, shardings = _named(model), _shardings(model, layout)
    return {
        name: jax.ShapeDtypeStruct(
            tuple(value.shape), value.dtype, sharding=shardings[name]
        )
        for name, value in values.items()
    }


def take(model: Any, strategy: Any, values: Mapping[str, Any]) -> None:
    """Assigns what was read."""
    mesh, layout = _mesh_of(strategy), _over_processes(model, strategy)
    for name, variable in _named(model).items():
        value = values[name]
        if layout is not None:
            value = whole_here(value, in_host_memory())
        elif mesh is not None:
            value = lowered(value, mesh)
        variable.assign(value)
