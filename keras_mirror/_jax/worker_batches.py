"""One global batch out of what the workers bring.

Every worker walks its own copy of the data. Before a step they tell each other what
they have, so that nobody enters a step alone: it would wait there for ever.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from keras_mirror import errors
from keras_mirror._jax import processes
from keras_mirror._jax.batch import StepBatch, flatten, prepare
from keras_mirror._jax.mesh import at_home, by_rows
from keras_mirror._jax.preemption import is_asked_to_leave

Shapes = list[tuple[tuple[int, ...], str]]


def _shapes(data: Any) -> Shapes:
    leaves, _ = flatten(data)
    return [(leaf.shape, str(leaf.dtype)) for leaf in leaves]


def _rows(shapes: Any) -> str:
    if shapes is None:
        return "no more batches"
    rows = {shape[0] if shape else 0 for shape, _ in shapes}
    return f"{rows.pop()} rows" if len(rows) == 1 else str(shapes)


class WorkerBatches:
    """Takes batches together with the other workers.

    Args:
        mesh: The mesh over all workers.
        what: What the batches are for; workers must agree on it.
        is_own_part: Whether a worker's batch is its part of the global batch
            (`auto_shard="off"`), rather than the global batch that all have.
        may_leave: Whether workers that were asked to leave do so here.
    """

    def __init__(self, mesh: Mesh, what: str, *, is_own_part: bool, may_leave: bool):
        self._mesh = mesh
        self._what = what
        self._is_own_part = is_own_part
        self._may_leave = may_leave

    def take(self, take: Callable[[], Any], *, is_first: bool) -> Any:
        """The next batch of all workers.

        Args:
            take: Returns this worker's next batch.
            is_first: Whether it is the first of those that one call takes.

        Raises:
            StopIteration: No worker has one.
            PreemptedExit: A worker was asked to leave; on every worker.
            WorkersDifferError: On every worker, where they do not fit together.
        """
        try:
            data = take()
        except StopIteration:
            data = None
        return self._meet(data, may_leave=self._may_leave and is_first)

    def _meet(self, data: Any, *, may_leave: bool) -> Any:
        shapes = None if data is None else _shapes(data)
        told = processes.exchange([shapes, is_asked_to_leave()], self._what)
        found = [value for value, _ in told]
        if all(value is None for value in found):
            raise StopIteration
        leaving = [index for index, (_, leaves) in enumerate(told) if leaves]
        if leaving and may_leave:
            raise errors.PreemptedExit(leaving)
        if self._is_own_part:
            return self._joined(data, found)
        if any(value != found[0] for value in found):
            raise errors.WorkersDifferError(
                "batches", [_rows(value) for value in found]
            )
        return data

    def _joined(self, data: Any, found: list[Any]) -> StepBatch:
        """The workers' parts, one after the other, as one batch."""
        if any(value is None for value in found) or any(
            [(shape[1:], kind) for shape, kind in value]
            != [(shape[1:], kind) for shape, kind in found[0]]
            or len({shape[0] if shape else None for shape, _ in value}) > 1
            for value in found
        ):
            raise errors.WorkersDifferError("parts", [_rows(value) for value in found])
        counts = [value[0][0][0] for value in found]
        me = jax.process_index()
        own = slice(sum(counts[:me]), sum(counts[: me + 1]))
        leaves, structure = flatten(data)
        leaves = [np.asarray(leaf) for leaf in leaves]
        if len(set(counts)) == 1 and counts[0] % at_home(self._mesh).size == 0:
            placed = [self._placed(leaf, sum(counts)) for leaf in leaves]
            return StepBatch(structure.unflatten(placed), None, True, own)
        whole = prepare(
            structure.unflatten([_all_rows(leaf, counts) for leaf in leaves]),
            self._mesh,
        )
        return StepBatch(whole.data, whole.rows, whole.is_even, own)

    def _placed(self, leaf: np.ndarray, rows: int) -> jax.Array:
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jax.make_array_from_process_local_data(
            by_rows(self._mesh), leaf.astype(dtype, copy=False), (rows, *leaf.shape[1:])
        )


def _all_rows(leaf: np.ndarray, counts: list[int]) -> np.ndarray:
    """Every worker's rows of an array, on every worker."""
    padded = np.zeros((max(counts), *leaf.shape[1:]), leaf.dtype)
    padded[: len(leaf)] = leaf
    parts = np.asarray(multihost_utils.process_allgather(padded))
    return np.concatenate([part[:n] for part, n in zip(parts, counts, strict=True)])
