"""Batches: what the replicas divide is sharded by rows, the rest is padded."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import sparse
from jax.sharding import Mesh

from keras_mirror._jax.mesh import by_rows, replicated


@dataclass(frozen=True)
class PlacedBatch:
    """A batch on the mesh.

    Attributes:
        data: The nest of arrays that the step gets.
        rows: How many leading rows are real where the batch was padded, else None.
        is_even: Whether every array is divided by rows without padding.
    """

    data: Any
    rows: int | None
    is_even: bool


def _is_dense(leaf: Any) -> bool:
    return not isinstance(leaf, sparse.JAXSparse)


def _as_array(leaf: Any) -> Any:
    if isinstance(leaf, (jax.Array, np.ndarray)) or not _is_dense(leaf):
        return leaf
    return np.asarray(leaf)


def _leaves(data: Any) -> list[Any]:
    return jax.tree.leaves(data, is_leaf=lambda leaf: not _is_dense(leaf))


def common_rows(data: Any) -> int | None:
    """The number of rows that all arrays of a batch share, or None."""
    leaves = _leaves(data)
    if not leaves or any(not _is_dense(x) or np.ndim(x) < 1 for x in leaves):
        return None
    rows = {x.shape[0] for x in leaves}
    return rows.pop() if len(rows) == 1 else None


def _put(data: Any, sharding: Any) -> Any:
    return jax.device_put(data, sharding)


def _pad(leaf: Any, padded_rows: int) -> Any:
    # Real rows repeated, not zeros: a zero row could make a NaN that survives a
    # mask. Padding happens on the host so that no program is compiled for it.
    rows = leaf.shape[0]
    return np.take(np.asarray(leaf), np.arange(padded_rows) % rows, axis=0)


def _put_irregular(leaf: Any, mesh: Mesh) -> Any:
    if isinstance(leaf, np.ndarray):
        leaf = leaf.copy()  # its owner may fill it again; see `_place_ahead`
    divisible = _is_dense(leaf) and np.ndim(leaf) and leaf.shape[0] % mesh.size == 0
    return _put(leaf, by_rows(mesh) if divisible else replicated(mesh))


def place(data: Any, mesh: Mesh) -> PlacedBatch:
    """Puts a batch on the mesh; no device receives rows that it does not need.

    Args:
        data: A nest of arrays, first axis the global batch; None parts allowed.
        mesh: The strategy's mesh.

    Returns:
        The batch. What the replicas do not divide is padded to the next multiple
        by repeating rows, to be sliced off inside the step. Arrays that share no
        common number of rows, and sparse ones, are laid out one by one.
    """
    data = jax.tree.map(_as_array, data, is_leaf=lambda x: not _is_dense(x))
    rows = common_rows(data)
    if rows is None or rows == 0:
        placed = jax.tree.map(
            lambda leaf: _put_irregular(leaf, mesh),
            data,
            is_leaf=lambda x: not _is_dense(x),
        )
        return PlacedBatch(placed, None, False)
    if rows % mesh.size == 0:
        return PlacedBatch(_put(data, by_rows(mesh)), None, True)
    padded = -(-rows // mesh.size) * mesh.size
    data = jax.tree.map(lambda leaf: _pad(leaf, padded), data)
    return PlacedBatch(_put(data, by_rows(mesh)), rows, False)


def _place_ahead(data: Any, mesh: Mesh, may_be_reused: bool) -> Any:
    """The batch on the mesh where that needs no padding, else as it came.

    A padded batch would show Keras a wrong number of rows; the step pads it.
    """
    data = jax.tree.map(_as_array, data, is_leaf=lambda x: not _is_dense(x))
    rows = common_rows(data)
    if not rows or rows % mesh.size:
        return data
    if may_be_reused:
        # `device_put` reads the buffer later, or on CPU for ever: a generator that
        # fills one buffer again and again would change batches under the step.
        data = jax.tree.map(
            lambda x: x.copy() if isinstance(x, np.ndarray) else x, data
        )
    return _put(data, by_rows(mesh))


def batches(source: Iterable[Any], mesh: Mesh, *, may_be_reused: bool) -> Iterator[Any]:
    """Yields batches of `source`, placed one batch ahead of the step.

    On CPU there is nothing to overlap, and no batch is asked for before its turn
    (as Keras itself does it).
    """
    ahead: list[Any] = []
    depth = 0 if jax.default_backend() == "cpu" else 1
    for data in source:
        ahead.append(_place_ahead(data, mesh, may_be_reused))
        if len(ahead) > depth:
            yield ahead.pop(0)
    yield from ahead
