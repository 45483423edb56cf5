"""The one place that knows differences between JAX versions."""

import contextlib

import jax
from jax.sharding import AxisType, Mesh

shard_map = jax.shard_map


def bound_axes() -> tuple[str, ...]:
    """Names of the axes that `shard_map` or `pmap` has bound here."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == AxisType.Manual)


def is_bound(axis_name: str) -> bool:
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


def _varying(value: object) -> frozenset[str]:
    kind = jax.typeof(value)
    manual = getattr(kind, "manual_axis_type", None)  # JAX >= 0.10
    if manual is not None:
        return frozenset(manual.varying)
    return frozenset(getattr(kind, "vma", ()))


def is_already_summed(value: object, axis_name: str) -> bool:
    """Whether a gradient of replicated weights is a sum over the axis already.

    Under shard_map's default `check_vma=True` JAX sums such gradients itself; the
    type of the value then says that it does not vary over the axis. Without the
    check nothing is tracked, and nothing has been summed.
    """
    tracked = axis_name in _varying(jax.lax.axis_index(axis_name))
    return tracked and axis_name not in _varying(value)
