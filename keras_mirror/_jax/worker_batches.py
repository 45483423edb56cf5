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
from keras_mirror._engine import Part
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
        may_leave: Whether workers that were asked to leave do so here.
    """

    def __init__(self, mesh: Mesh, what: str, *, may_leave: bool):
        self._mesh = mesh
        self._what = what
        self._may_leave = may_leave

    def take(
        self, take: Callable[[], Any], part: Part | None, *, is_first: bool
    ) -> Any:
        """The next batch of all workers.

        Args:
            take: Returns this worker's next batch.
            part: How that is part of the global batch; None where it is the global
                batch, which all have.
            is_first: Whether it is the first of those that one call takes.

        Raises:
            StopIteration: No worker has one.
            PreemptedExit: A worker was asked to leave; on every worker.
            WorkersDifferError: On every worker, where they do not fit together.
        """
        batch = None
        while batch is None:
            try:
                data = take()
            except StopIteration:
                data = None
            batch = self._meet(data, part, may_leave=self._may_leave and is_first)
        return batch

    def _meet(self, data: Any, part: Part | None, *, may_leave: bool) -> Any:
        """One global batch; None where it would have no rows."""
        what = self._what if part is None else f"a part of {self._what}"
        shapes = None if data is None else _shapes(data)
        told = processes.exchange([shapes, is_asked_to_leave()], what)
        found = [value for value, _ in told]
        if all(value is None for value in found):
            raise StopIteration
        leaving = [index for index, (_, leaves) in enumerate(told) if leaves]
        if leaving and may_leave:
            raise errors.PreemptedExit(leaving)
        if part is not None:
            return self._joined(data, found, part)
        if any(value != found[0] for value in found):
            raise errors.WorkersDifferError(
                "batches", [_rows(value) for value in found]
            )
        return data

    def _joined(self, data: Any, found: list[Any], part: Part) -> StepBatch | None:
        """The workers' parts, one after the other, as one batch."""
        if part.may_run_out:
            kinds = next(value for value in found if value is not None)
            empty = [[[0, *shape[1:]], kind] for shape, kind in kinds]
            found = [empty if value is None else value for value in found]
            if data is None:
                data = _without_rows(part.example, empty)
        if not _fit_together(found):
            raise errors.WorkersDifferError("parts", [_rows(value) for value in found])
        counts = [value[0][0][0] for value in found]
        if not sum(counts):
            return None
        me = jax.process_index()
        own = None
        if part.keeps_rows:
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


def _fit_together(found: list[Any]) -> bool:
    """Whether parts of these shapes make one batch."""
    if any(value is None for value in found):
        return False
    kinds = [[(shape[1:], kind) for shape, kind in value] for value in found]
    rows = [{shape[0] if shape else None for shape, _ in value} for value in found]
    return all(kind == kinds[0] for kind in kinds) and all(len(r) == 1 for r in rows)


def _without_rows(example: Any, shapes: Any) -> Any:
    """A batch of no rows: a nest like `example`, of arrays of these shapes."""
    arrays = [np.zeros(shape, kind) for shape, kind in shapes]
    return jax.tree.structure(example).unflatten(arrays)


def _all_rows(leaf: np.ndarray, counts: list[int]) -> np.ndarray:
    """Every worker's rows of an array, on every worker."""
    padded = np.zeros((max(counts), *leaf.shape[1:]), leaf.dtype)
    padded[: len(leaf)] = leaf
    parts = np.asarray(multihost_utils.process_allgather(padded))
    return np.concatenate([part[:n] for part, n in zip(parts, counts, strict=True)])
