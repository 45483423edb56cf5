"""A model's variables as a checkpoint has them: arrays over all processes, by place."""

from collections.abc import Mapping
from typing import Any

import jax

from keras_mirror._jax.mesh import spans_processes
from keras_mirror._jax.sharded import groups_of
from keras_mirror._jax.state import lifted, lowered

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


def arrays(model: Any, strategy: Any) -> dict[str, jax.Array]:
    """The values, each where it lies."""
    mesh = _mesh_of(strategy)
    return {
        name: variable.value if mesh is None else lifted(variable.value, mesh)
        for name, variable in _named(model).items()
    }


def templates(model: Any, strategy: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape, dtype and layout of each, as it is to be read."""
    return {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)
        for name, value in arrays(model, strategy).items()
    }


def take(model: Any, strategy: Any, values: Mapping[str, Any]) -> None:
    """Assigns what was read."""
    mesh = _mesh_of(strategy)
    for name, variable in _named(model).items():
        value = values[name]
        variable.assign(value if mesh is None else lowered(value, mesh))
