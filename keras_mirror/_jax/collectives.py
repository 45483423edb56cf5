"""Putting values of the replicas together, in as few collectives as can be."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from keras_mirror import _context, errors
from keras_mirror._jax.compat import (
    bound_axes,
    goes_by_gloo,
    is_already_summed,
    is_bound,
    process_count,
)
from keras_mirror._jax.mesh import DEVICE, MIRROR, SERVER, WORKER, Axis

# With gloo each device of each process is a rank of its own: inside a worker and
# then between takes fewer rounds of messages than all ranks at once, and sends more
# bytes. Where it is faster was measured: docs/benchmarks.md, "Two levels".
_FEWEST_DEVICES_IN_TWO_LEVELS = 4
_MOST_BYTES_IN_TWO_LEVELS = 512 * 1024


def is_float(value: Any) -> bool:
    """Whether a mean of the value makes sense in its own dtype."""
    return jnp.issubdtype(value.dtype, jnp.floating)


def sum_and_mean(
    sums: Any, means: Any, axis: Axis, num_replicas: int
) -> tuple[Any, Any]:
    """Sums one nest and averages another over the replicas, in one collective.

    Args:
        sums: Nest of arrays to add up.
        means: Nest of float arrays to average.
        axis: The bound axis, or axes.
        num_replicas: Its size.

    Returns:
        Both nests, equal on all replicas.
    """
    total = _gloo_sum if _goes_by_gloo(axis) else jax.lax.psum
    sums, means = total((sums, means), axis)
    return sums, jax.tree.map(lambda value: value / num_replicas, means)


def _goes_by_gloo(axis: Axis) -> bool:
    if axis not in ((WORKER, DEVICE), (MIRROR, SERVER)):
        return False
    return _size(axis[0]) > 1 and process_count() > 1 and goes_by_gloo()


def _size(axis: Axis) -> int:
    return jax.lax.axis_size(axis)


def _gloo_sum(values: Any, axis: Axis) -> Any:
    """What `psum` returns, by one message where gloo would send one an array."""
    leaves, structure = jax.tree.flatten(values)
    places: dict[Any, list[int]] = {}
    for place, leaf in enumerate(leaves):
        places.setdefault(leaf.dtype, []).append(place)
    for same in places.values():
        arrays = [leaves[place] for place in same]
        vector = _vector_sum(_in_one(arrays), axis)
        parts = jnp.split(vector, np.cumsum([a.size for a in arrays])[:-1])
        for place, array, part in zip(same, arrays, parts, strict=True):
            leaves[place] = part.reshape(array.shape)
    return structure.unflatten(leaves)


def _in_one(arrays: list[jax.Array]) -> jax.Array:
    """Arrays of one dtype, one after the other."""
    # Not `concatenate`: XLA's CPU compiler then computes the gradients inside of its
    # loop, element by element (237 ms for 5 in a step of the benchmark's MLP).
    vector = jnp.empty(sum(array.size for array in arrays), arrays[0].dtype)
    start = 0
    for array in arrays:
        part = array.ravel()
        vector = jax.lax.dynamic_update_slice(vector, part, (start,))
        start += array.size
    return vector


def _vector_sum(vector: jax.Array, axis: Axis) -> jax.Array:
    between, inside = axis
    is_small = vector.nbytes <= _MOST_BYTES_IN_TWO_LEVELS
    if is_small and _size(inside) >= _FEWEST_DEVICES_IN_TWO_LEVELS:
        return jax.lax.psum(jax.lax.psum(vector, inside), between)
    return jax.lax.psum(vector, axis)


def entering(value: jax.Array, aggregation: str, replica_id: jax.Array) -> jax.Array:
    """A variable's value as one replica starts from it.

    What is summed over replicas at the end starts from zero on all but the first, so
    that the sum is right whether a replica adds to it or sets it anew.
    """
    if aggregation != "sum":
        return value
    return jnp.where(replica_id == 0, value, jnp.zeros_like(value))


def combine(
    new: jax.Array, aggregation: str, replica_id: jax.Array
) -> tuple[str, jax.Array]:
    """How a replica's new value of a variable enters a collective.

    Args:
        new: The value this replica arrived at.
        aggregation: The variable's own wish, "none" where it has none.
        replica_id: Index of this replica.

    Returns:
        "mean" or "sum", and what to average or to sum.
    """
    if aggregation == "sum":
        return "sum", new
    if aggregation != "only_first_replica" and is_float(new):
        return "mean", new
    # Integers and flags are counters that agree on all replicas, or belong to the
    # first one.
    return "sum", jnp.where(replica_id == 0, new, jnp.zeros_like(new))


def _axis(axis_name: Axis | None) -> Axis | None:
    bound = bound_axes()
    here = _context.replica_context()
    if axis_name is None and here is not None:
        return here.axis_name
    if axis_name is not None:
        if is_bound(axis_name):
            return axis_name
        if bound:
            raise errors.ReplicaAxisError(axis_name, bound)
        return None
    if len(bound) > 1:
        raise errors.ReplicaAxisError(None, bound)
    return bound[0] if bound else None


def reduce_gradients(
    grads: Sequence[Any],
    variables: Sequence[Any],
    *,
    reduction: str,
    axis_name: Axis | None,
) -> list[Any]:
    """Gradients of this replica's rows -> gradients of the whole batch.

    Args:
        grads: One array per variable, None where there is none.
        variables: The variables, to find those that are overwritten with their
            "gradient" (float8 scales), which the largest replica decides.
        reduction: "mean" or "sum".
        axis_name: The axis to reduce over; None takes that of the replica that is
            traced, else the one that is bound.

    Returns:
        The reduced gradients; `grads` itself where no axis is bound.
    """
    axis = _axis(axis_name)
    grads = list(grads)
    if axis is None:
        return grads
    count = jax.lax.axis_size(axis)
    pending = {}
    for i, grad in enumerate(grads):
        if grad is None:
            continue
        if getattr(variables[i], "overwrite_with_gradient", False):
            grads[i] = jax.lax.pmax(grad, axis)
        elif is_already_summed(grad, axis):
            grads[i] = grad / count if reduction == "mean" else grad
        else:
            pending[i] = grad
    means, sums = (pending, {}) if reduction == "mean" else ({}, pending)
    sums, means = sum_and_mean(sums, means, axis, count)
    for i, grad in {**sums, **means}.items():
        grads[i] = grad
    return grads
