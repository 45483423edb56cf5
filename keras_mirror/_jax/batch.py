"""Batches: what the replicas divide is sharded by rows, the rest is padded."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import sparse
from jax.sharding import Mesh, NamedSharding

from keras_mirror import errors
from keras_mirror._engine import Part
from keras_mirror._jax.copies import from_whole
from keras_mirror._jax.mesh import by_rows, replicated, spans_processes


@dataclass(frozen=True)
class StepBatch:
    """A batch as a step takes it.

    Attributes:
        data: The nest of arrays that the step gets.
        rows: How many leading rows are real where the batch was padded, else None.
        is_even: Whether every array is divided by rows without padding.
        own: Which rows this worker brought, where each brings a part of its own.
    """

    data: Any
    rows: int | None
    is_even: bool
    own: slice | None = None

    @property
    def is_by_rows(self) -> bool:
        """Whether every array is divided by rows, padded or not."""
        return self.is_even or self.rows is not None

    def signature(self) -> Any:
        """What of a batch decides whether rows mix; hashable."""
        leaves, structure = jax.tree.flatten(self.data)
        return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def is_sparse(leaf: Any) -> bool:
    """Whether it is one of JAX's sparse arrays."""
    return isinstance(leaf, sparse.JAXSparse)


def flatten(data: Any) -> tuple[list[Any], Any]:
    """The arrays of a batch, sparse ones whole, and its structure."""
    leaves, structure = jax.tree.flatten(data, is_leaf=is_sparse)
    known = (jax.Array, np.ndarray, sparse.JAXSparse)
    return [x if isinstance(x, known) else np.asarray(x) for x in leaves], structure


def _common_rows(leaves: list[Any]) -> int | None:
    """The number of rows that all arrays of a batch share, or None."""
    if not leaves or any(is_sparse(x) or x.ndim < 1 for x in leaves):
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
    divisible = not is_sparse(leaf) and leaf.ndim and leaf.shape[0] % mesh.size == 0
    sharding = by_rows(mesh) if divisible else replicated(mesh)
    if spans_processes(mesh):
        return _from_here(leaf, sharding)
    return jax.device_put(_own(leaf), sharding)


def _on_mesh(leaves: list[Any], mesh: Mesh) -> list[jax.Array]:
    if not spans_processes(mesh):
        return jax.device_put(leaves, by_rows(mesh))
    return [_from_here(leaf, by_rows(mesh)) for leaf in leaves]


def everywhere(value: Any, mesh: Mesh) -> jax.Array:
    """A value that all processes have, whole on every device of the mesh."""
    return _from_here(value, replicated(mesh))


def _from_here(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """An array over all processes; each brings what lies on its own devices."""
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
        return leaf
    if is_sparse(leaf):
        return jax.tree.map(lambda part: _from_here(part, sharding), leaf)
    return from_whole(leaf, sharding)


def _is_placed(leaves: list[Any], mesh: Mesh) -> bool:
    rows = by_rows(mesh)
    return all(isinstance(x, jax.Array) and x.sharding == rows for x in leaves)


def prepare(data: Any, mesh: Mesh) -> StepBatch:
    """Makes of a batch what a step takes; no device receives rows of another.

    Args:
        data: A nest of arrays, first axis the global batch; None parts allowed.
        mesh: The strategy's mesh.

    Returns:
        The batch. What the replicas do not divide is padded to the next multiple
        by repeating rows, to be sliced off inside the step. Arrays that share no
        common number of rows, and sparse ones, are laid out one by one.
    """
    if isinstance(data, StepBatch):
        return data
    leaves, structure = flatten(data)
    rows = _common_rows(leaves)
    if not rows:
        placed = [_put_irregular(leaf, mesh) for leaf in leaves]
        return StepBatch(structure.unflatten(placed), None, False)
    is_even = rows % mesh.size == 0
    if not is_even:
        padded = -(-rows // mesh.size) * mesh.size
        leaves = [_pad(leaf, padded) for leaf in leaves]
    # Not left to the compiled step, which would take the host's arrays for less:
    # with jaxlib 0.10 on CPU devices a step whose inputs are still being copied can
    # stand still in an all-reduce (three runs of three within a minute).
    if not _is_placed(leaves, mesh):
        leaves = _on_mesh(leaves, mesh)
    return StepBatch(structure.unflatten(leaves), None if is_even else rows, is_even)


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
    leaves, _ = flatten(data)
    rows = _common_rows(leaves)
    if leaves and (not rows or rows % mesh.size):
        raise errors.UnevenBatchError([x.shape for x in leaves], mesh.size)


class Batches(Iterator[Any]):
    """Batches of `source`, on the mesh one batch ahead of the step.

    On CPU there is nothing to overlap, and no batch is asked for before its turn
    (as Keras itself does it).

    Args:
        source: Batches: nests of arrays, first axis the global batch.
        mesh: The strategy's mesh.
        may_be_reused: Whether the source may write to a batch it has handed out.
        must_be_even: Whether a batch that the replicas do not divide is an error.
        part: How the batches are part of the global ones; None where they are those.

    Raises:
        UnevenBatchError: From `next`, where `must_be_even` says so.

    Attributes:
        asked: How many batches workers have asked each other for.
    """

    def __init__(
        self,
        source: Iterable[Any],
        mesh: Mesh,
        *,
        may_be_reused: bool,
        must_be_even: bool = False,
        part: Part | None = None,
    ):
        self.part = part
        self.asked = 0
        self._is_fresh = True
        self._source = iter(source)
        self._mesh = mesh
        self._may_be_reused = may_be_reused
        self._must_be_even = must_be_even
        self._ahead: deque[Any] | None = None
        # Workers first agree on a batch, as it lies on the host.
        if jax.default_backend() != "cpu" and not spans_processes(mesh):
            self._ahead = deque()

    def __next__(self) -> Any:
        """A batch on the mesh; one that would need padding as it came."""
        is_first, self._is_fresh = self._is_fresh, False
        try:
            return self._placed(self.take())
        except StopIteration:
            if not is_first or self.part is None or not self.part.may_run_out:
                raise
            # Keras builds a model from the first batch, also where there is none.
            return self.part.example

    def take(self) -> Any:
        """A batch for a step, which puts it on the mesh where it is not."""
        if self._ahead is None:
            return self._own(next(self._source))
        while len(self._ahead) < 2:
            try:
                data = next(self._source)
            except StopIteration:
                break
            self._ahead.append(self._placed(self._own(data)))
        if not self._ahead:
            raise StopIteration
        return self._ahead.popleft()

    def _own(self, data: Any) -> Any:
        if self._must_be_even:
            _check_even(data, self._mesh)
        if not self._may_be_reused:
            return data
        leaves, structure = flatten(data)
        return structure.unflatten([_own(leaf) for leaf in leaves])

    def _placed(self, data: Any) -> Any:
        # A padded batch would show Keras a wrong number of rows; the step pads it.
        leaves, structure = flatten(data)
        rows = _common_rows(leaves)
        if rows and rows % self._mesh.size == 0:
            leaves = _on_mesh(leaves, self._mesh)
        return structure.unflatten(leaves)
