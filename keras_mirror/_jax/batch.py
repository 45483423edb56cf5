"""Batches: what the replicas divide is sharded by rows, the rest is padded."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import sparse
from jax.sharding import Mesh

from keras_mirror import errors
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


def _is_sparse(leaf: Any) -> bool:
    return isinstance(leaf, sparse.JAXSparse)


def _flatten(data: Any) -> tuple[list[Any], Any]:
    """The arrays of a batch, sparse ones whole, and its structure."""
    leaves, structure = jax.tree.flatten(data, is_leaf=_is_sparse)
    known = (jax.Array, np.ndarray, sparse.JAXSparse)
    return [x if isinstance(x, known) else np.asarray(x) for x in leaves], structure


def _common_rows(leaves: list[Any]) -> int | None:
    """The number of rows that all arrays of a batch share, or None."""
    if not leaves or any(_is_sparse(x) or x.ndim < 1 for x in leaves):
        return None
    rows = leaves[0].shape[0]
    return rows if all(x.shape[0] == rows for x in leaves) else None


def _pad(leaf: Any, padded_rows: int) -> Any:
    # Real rows repeated, not zeros: a zero row could make a NaN that survives a
    # mask. Padding happens on the host so that no program is compiled for it.
    rows = leaf.shape[0]
    return np.take(np.asarray(leaf), np.arange(padded_rows) % rows, axis=0)


def _own(leaf: Any) -> Any:
    """A copy that nobody else will write to.

    `device_put` reads the buffer later, or on CPU for ever: a generator that fills
    one buffer again and again would change batches under the step.
    """
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _put_irregular(leaf: Any, mesh: Mesh) -> Any:
    divisible = not _is_sparse(leaf) and leaf.ndim and leaf.shape[0] % mesh.size == 0
    sharding = by_rows(mesh) if divisible else replicated(mesh)
    return jax.device_put(_own(leaf), sharding)


def _is_placed(leaves: list[Any], mesh: Mesh) -> bool:
    rows = by_rows(mesh)
    return all(isinstance(x, jax.Array) and x.sharding == rows for x in leaves)


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
    leaves, structure = _flatten(data)
    rows = _common_rows(leaves)
    if not rows:
        placed = [_put_irregular(leaf, mesh) for leaf in leaves]
        return PlacedBatch(structure.unflatten(placed), None, False)
    if rows % mesh.size == 0:
        if not _is_placed(leaves, mesh):
            leaves = jax.device_put(leaves, by_rows(mesh))
        return PlacedBatch(structure.unflatten(leaves), None, True)
    padded = -(-rows // mesh.size) * mesh.size
    leaves = jax.device_put([_pad(x, padded) for x in leaves], by_rows(mesh))
    return PlacedBatch(structure.unflatten(leaves), rows, False)


def _place_ahead(data: Any, mesh: Mesh, may_be_reused: bool) -> Any:
    """The batch on the mesh where that needs no padding, else as it came.

    A padded batch would show Keras a wrong number of rows; the step pads it.
    """
    leaves, structure = _flatten(data)
    rows = _common_rows(leaves)
    if may_be_reused:
        leaves = [_own(leaf) for leaf in leaves]
    if rows and rows % mesh.size == 0:
        leaves = jax.device_put(leaves, by_rows(mesh))
    return structure.unflatten(leaves)


def place_inputs(inputs: Any, mesh: Mesh) -> Any:
    """Copies to the mesh what lies on other devices; nests of any leaves."""
    devices = set(mesh.devices.flat)

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
            return leaf
        if leaf.sharding.device_set == devices:
            return leaf
        return jax.device_put(leaf, replicated(mesh))

    return jax.tree.map(move, inputs)


def _check_even(data: Any, mesh: Mesh) -> None:
    leaves, _ = _flatten(data)
    rows = _common_rows(leaves)
    if leaves and (not rows or rows % mesh.size):
        raise errors.UnevenBatchError([x.shape for x in leaves], mesh.size)


def batches(
    source: Iterable[Any],
    mesh: Mesh,
    *,
    may_be_reused: bool,
    must_be_even: bool = False,
) -> Iterator[Any]:
    """Yields batches of `source`, placed one batch ahead of the step.

    On CPU there is nothing to overlap, and no batch is asked for before its turn
    (as Keras itself does it).

    Args:
        source: Batches: nests of arrays, first axis the global batch.
        mesh: The strategy's mesh.
        may_be_reused: Whether the source may write to a batch it has handed out.
        must_be_even: Whether a batch that the replicas do not divide is an error.

    Raises:
        UnevenBatchError: Where `must_be_even` says so.
    """
    ahead: list[Any] = []
    depth = 0 if jax.default_backend() == "cpu" else 1
    for data in source:
        if must_be_even:
            _check_even(data, mesh)
        ahead.append(_place_ahead(data, mesh, may_be_reused))
        if len(ahead) > depth:
            yield ahead.pop(0)
    yield from ahead
