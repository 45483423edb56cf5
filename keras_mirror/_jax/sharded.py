"""Where the variables of a model lie: whole on every device, or split over servers."""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from keras_mirror import _context
from keras_mirror._jax import compat
from keras_mirror._jax.mesh import (
    MIRROR,
    SERVER,
    alone,
    at_home,
    in_host_memory,
    replicated,
    replicated_at_home,
    servers_span_processes,
)

# The groups of a step's state, in Keras' order. Metrics are never split.
_TRAINABLE, _NON_TRAINABLE, _OPTIMIZER = 0, 1, 2


def split_axis(shape: tuple[int, ...], servers: int, min_elements: int) -> int | None:
    """The axis along which the servers share a variable; None where each has it whole.

    It is the longest of those that the servers divide.
    """
    if servers < 2 or math.prod(shape) < max(min_elements, 1):
        return None
    sizes = [size if size % servers == 0 else 0 for size in shape]
    return sizes.index(max(sizes)) if any(sizes) else None


def is_central(strategy: Any) -> bool:
    """Whether a strategy keeps all variables in one place."""
    return getattr(strategy, "storage_device", None) is not None


def axis_of(shape: Any, dtype: Any, strategy: Any) -> int | None:
    """The axis along which the servers of `strategy` share such a variable."""
    if "float" not in str(dtype):
        return None
    servers = strategy.mesh.shape[SERVER]
    return split_axis(tuple(shape), servers, strategy.min_shard_elements)


def _axes(variables: Any, strategy: Any) -> tuple[int | None, ...]:
    return tuple(
        # These have other values on other replicas in the middle of a step.
        None
        if variable.aggregation == "sum"
        or getattr(variable, "overwrite_with_gradient", False)
        else axis_of(variable.shape, variable.dtype, strategy)
        for variable in variables
    )


def spec_of(axis: int | None) -> P:
    """How an array lies that is split along `axis`."""
    return P() if axis is None else P(*[None] * axis, SERVER)


@dataclass(frozen=True)
class Layout:
    """How a strategy lays out the state of the steps of one model.

    Attributes:
        mesh: The replicas.
        parameters: Of each trainable variable, the axis along which it is split
            between steps; None where it is whole.
        gradients: The axis along which its gradient and its slots are split.
        others: Of each non-trainable variable, the axis along which it is split.
        slots: Of each variable of the optimizer, the axis along which it is split.
        is_in_one: Whether gradients are sent by one collective, once all are there.
        home: Where all of the state lies instead, away from the mesh.
        at_rest: Where each process has all of it whole between the calls of a model,
            and at each look at a variable.
    """

    mesh: Mesh
    parameters: tuple[int | None, ...] = ()
    gradients: tuple[int | None, ...] = ()
    others: tuple[int | None, ...] = ()
    slots: tuple[int | None, ...] = ()
    is_in_one: bool = False
    home: NamedSharding | None = None
    at_rest: NamedSharding | None = None

    @property
    def is_split(self) -> bool:
        """Whether anything is."""
        return any(axis is not None for axis in (*self.gradients, *self.others))

    def at_home(self) -> "Layout":
        """The layout of what this process has of the state."""
        if self.home is not None:
            return self
        return dataclasses.replace(self, mesh=at_home(self.mesh))

    def sharding(self, axis: int | None) -> NamedSharding:
        """How an array lies that is split along `axis`."""
        if axis is None:
            return replicated(self.mesh)
        return NamedSharding(self.mesh, spec_of(axis))

    def of_state(self, sizes: list[int]) -> tuple[list[NamedSharding], ...]:
        """How each array of a state lies whose groups have these sizes."""
        if self.home is not None:
            return tuple([self.home] * size for size in sizes)
        # (trainable, non-trainable), perhaps the optimizer's, and metrics.
        groups: list[Any] = [self.parameters, self.others]
        if len(sizes) == 4:
            groups.append(self.slots)
        groups += [()] * (len(sizes) - len(groups))
        return tuple(
            [self.sharding(axis) for axis in axes or [None] * size]
            for axes, size in zip(groups, sizes, strict=True)
        )

    def constrained(
        self, values: Any, axes: Any, *, are_whole: bool = False
    ) -> list[jax.Array]:
        """Values inside of a program, those with an axis split along it, or whole."""
        if not self.is_split:
            return list(values)
        return [
            value
            if axis is None
            else jax.lax.with_sharding_constraint(
                value, self.sharding(None if are_whole else axis)
            )
            for value, axis in zip(values, axes, strict=True)
        ]


def groups_of(model: Any) -> list[list[Any]]:
    """A model's variables as a step's state has them; two groups without optimizer."""
    parts = 4 if getattr(model, "optimizer", None) is not None else 2
    return _context.internals().state_variables(model, parts)


def place_of_calls(strategy: Any) -> Mesh:
    """Where `model(x)` outside of a step computes: where its variables lie."""
    if is_central(strategy):
        return alone(strategy.storage_device)
    if servers_span_processes(strategy.mesh):
        return in_host_memory().mesh  # pyright: ignore[reportReturnType]
    return at_home(strategy.mesh)


def layout_of(model: Any, strategy: Any) -> Layout:
    """How `strategy` lays out the variables that `model` has now."""
    mesh, shard = strategy.mesh, getattr(strategy, "shard", None)
    if is_central(strategy):
        return Layout(mesh, home=replicated(alone(strategy.storage_device)))
    if shard is None:
        return Layout(mesh)
    at_rest = in_host_memory() if servers_span_processes(mesh) else None
    if at_rest is not None and not is_compiled(model):
        return Layout(mesh, home=at_rest)
    groups = groups_of(model)
    gradients = _axes(groups[_TRAINABLE], strategy)
    others = _axes(groups[_NON_TRAINABLE], strategy)
    is_whole = shard != "parameters"
    return Layout(
        mesh,
        parameters=(None,) * len(gradients) if is_whole else gradients,
        gradients=gradients,
        others=(None,) * len(others) if is_whole else others,
        slots=_axes(groups[_OPTIMIZER], strategy) if len(groups) == 4 else (),
        is_in_one=shard == "optimizer",
        at_rest=at_rest,
    )


def layout_inside(model: Any, strategy: Any) -> Layout:
    """How the variables lie inside of the steps of the global view."""
    layout = layout_of(model, strategy)
    return layout if is_compiled(model) else Layout(layout.mesh)


def is_compiled(model: Any) -> bool:
    """Whether Keras compiles the steps of a model; else it runs them op by op."""
    return bool(model.jit_compile) and not model.run_eagerly


def variable_shardings(
    model: Any, strategy: Any, variables: list[Any]
) -> list[NamedSharding]:
    """Where each of these variables of `model` lies between steps."""
    layout = layout_of(model, strategy)
    place = layout.home or layout.at_rest
    if place is not None or not layout.is_split:
        return [place or replicated_at_home(layout.mesh)] * len(variables)
    groups, layout = groups_of(model), layout.at_home()
    state = layout.of_state([len(group) for group in groups])
    known = {
        id(variable): sharding
        for group, shardings in zip(groups, state, strict=True)
        for variable, sharding in zip(group, shardings, strict=True)
    }
    whole = replicated(layout.mesh)
    return [known.get(id(variable), whole) for variable in variables]


def gathered(block: jax.Array, axis: int | None) -> jax.Array:
    """In a replica: the whole array of which each server has a block."""
    return block if axis is None else _gathered(block, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(block: jax.Array, axis: int) -> jax.Array:
    return jax.lax.all_gather(block, SERVER, axis=axis, tiled=True)


def _gathered_forward(block: jax.Array, axis: int) -> tuple[jax.Array, None]:
    return _gathered(block, axis), None


def _gathered_backward(axis: int, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (_block_of_sum(gradient, axis),)


_gathered.defvjp(_gathered_forward, _gathered_backward)


def _block_of_sum(value: jax.Array, axis: int) -> jax.Array:
    """In a replica: its server's block of the sum over the servers."""
    if not compat.goes_by_gloo():
        return jax.lax.psum_scatter(value, SERVER, scatter_dimension=axis, tiled=True)
    # Gloo's reduce-scatter gives wrong numbers on its first rank where blocks have some
    # megabytes (github.com/jax-ml/jax/issues/40830). This sends as many bytes.
    servers = jax.lax.axis_size(SERVER)
    parts = jnp.moveaxis(value, axis, 0)
    parts = parts.reshape(servers, -1, *parts.shape[1:])
    parts = jax.lax.all_to_all(parts, SERVER, split_axis=0, concat_axis=0)
    return jnp.moveaxis(parts.sum(0), 0, axis)


def own_block(value: jax.Array, axis: int | None) -> jax.Array:
    """In a replica: the block of a whole array that its server keeps."""
    if axis is None:
        return value
    size = value.shape[axis] // jax.lax.axis_size(SERVER)
    start = jax.lax.axis_index(SERVER) * size
    return jax.lax.dynamic_slice_in_dim(value, start, size, axis)


def rows_of(block: jax.Array, ids: jax.Array) -> jax.Array:
    """In a replica: rows of a table that is split by rows, without putting it together.

    Args:
        block: This server's rows, f32[rows / servers, width].
        ids: Of the rows that this replica wants, int32[...]; as for `jnp.take`,
            negative ones count from the end, and those beyond give NaN.

    Returns:
        f32[..., width].

    Cost: each server sends the ids, and the rows that others want of it; in the
    backward pass the gradients of these rows.
    """
    own, servers = block.shape[0], jax.lax.axis_size(SERVER)
    total = own * servers
    flat = jnp.where(ids < 0, ids + total, ids).ravel()
    wanted = jax.lax.all_gather(flat, SERVER, tiled=True)
    here = wanted - jax.lax.axis_index(SERVER) * own
    is_here = (here >= 0) & (here < own)
    rows = jnp.take(block, jnp.where(is_here, here, 0), axis=0)
    rows = jnp.where(is_here[:, None], rows, 0)
    found = _block_of_sum(rows, 0)
    is_row = (flat >= 0) & (flat < total)
    found = jnp.where(is_row[:, None], found, jnp.nan)
    return found.reshape(*ids.shape, block.shape[1])


def scattered_sum(value: jax.Array, axis: int) -> jax.Array:
    """In a replica: its server's block of the sum over all replicas."""
    return mirrored_sum(_block_of_sum(value, axis))


def scattered_sums(values: list[jax.Array], axes: list[int]) -> list[jax.Array]:
    """`scattered_sum` of each, by one collective a dtype."""
    servers = jax.lax.axis_size(SERVER)
    rows = [
        jnp.moveaxis(value, axis, 0).reshape(servers, -1)
        for value, axis in zip(values, axes, strict=True)
    ]
    found: list[Any] = list(values)
    for dtype in dict.fromkeys(value.dtype for value in values):
        places = [i for i, value in enumerate(values) if value.dtype == dtype]
        joined = jnp.concatenate([rows[i] for i in places], axis=1)
        block = scattered_sum(joined, 0)[0]
        ends = np.cumsum([rows[i].shape[1] for i in places])[:-1]
        for i, part in zip(places, jnp.split(block, ends), strict=True):
            size, *rest = np.moveaxis(np.empty(values[i].shape, bool), axes[i], 0).shape
            part = part.reshape(size // servers, *rest)
            found[i] = jnp.moveaxis(part, 0, axes[i])
    return found


def mirrored_sum(block: jax.Array) -> jax.Array:
    """In a replica: sums what the servers of one block have, one a mirror."""
    return block if jax.lax.axis_size(MIRROR) == 1 else jax.lax.psum(block, MIRROR)


def not_kept(primitive: Any, *_: Any, **__: Any) -> bool:
    """For `jax.checkpoint`: everything is kept for the backward pass but gathers."""
    return primitive.name != "all_gather"
