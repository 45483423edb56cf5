"""One global batch out of what the workers bring.

Every worker walks its own copy of the data. Before a step they tell each other what
they have, so that nobody enters a step alone: it would wait there for ever.
"""

import contextlib
import itertools
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from keras_mirror import _context, errors
from keras_mirror._engine import Part, TrainingStopped
from keras_mirror._jax import processes
from keras_mirror._jax.batch import StepBatch, flatten, is_sparse, prepare
from keras_mirror._jax.mesh import from_own_rows
from keras_mirror._jax.preemption import is_asked_to_leave

# Part, place and path of variables.
Places = Sequence[Sequence[Any]]
Shapes = list[tuple[tuple[int, ...], str]]


def _shapes(data: Any) -> Shapes:
    leaves, _ = flatten(data)
    return [(leaf.shape, str(leaf.dtype)) for leaf in leaves]


_NO_MORE = "no more batches"


def _in_words(found: Sequence[Any]) -> list[str]:
    """What each worker has: rows where these differ, else all shapes and dtypes."""
    rows = [_rows(shapes) for shapes in found]
    if len(set(rows)) > 1 and None not in rows:
        return [str(each) for each in rows]
    return [_NO_MORE if v is None else _arrays(v) for v in found]


def _rows(shapes: Any) -> str | None:
    if shapes is None:
        return _NO_MORE
    counts = {shape[0] if shape else 0 for shape, _ in shapes}
    return f"{counts.pop()} rows" if len(counts) == 1 else None


def _arrays(shapes: Any) -> str:
    return ", ".join(f"{kind}{list(shape)}" for shape, kind in shapes)


# A checksum looks at no more numbers of a row.
_MOST_NUMBERS = 64
# What was warned of already in the outermost call of a model that is under way.
_warned: list[set[type[Warning]]] = []


@contextlib.contextmanager
def warning_once() -> Iterator[None]:
    """Inside, nothing is warned of twice; the outermost one counts."""
    _warned.append(_warned[-1] if _warned else set())
    try:
        yield
    finally:
        _warned.pop()


def _warn(warning: Warning) -> None:
    said = _warned[-1] if _warned else set()
    if type(warning) not in said:
        said.add(type(warning))
        warnings.warn(warning, stacklevel=2)


class WorkerBatches:
    """Takes batches together with the other workers.

    Args:
        mesh: The mesh over all workers.
        what: What the batches are for, as "to train on"; workers must agree on it.
        trained: The model that they train, where there is one: workers may leave
            or stop between two of its steps.
    """

    def __init__(self, mesh: Mesh, what: str, trained: Any = None):
        self._mesh = mesh
        self._what = what
        self._trained = trained

    def take(
        self,
        take: Callable[[], Any],
        part: Part | None,
        *,
        nth: int,
        is_first: bool,
        set_anew: Places = (),
        digest: Callable[[list[Any]], str] = str,
    ) -> Any:
        """The next batch of all workers.

        Args:
            take: Returns this worker's next batch.
            part: How that is part of the global batch; None where it is the global
                batch, which all have.
            nth: Its number in this data, from 1, for errors.
            is_first: Whether it is the first of those that one call takes.
            set_anew: Part, place and path of the variables that this worker has set
                since the last step.
            digest: Makes a checksum of variables, given their parts and places.

        Raises:
            StopIteration: No worker has one.
            TrainingStopped: A worker wants to stop; on every worker.
            PreemptedExit: A worker was asked to leave; on every worker.
            WorkersDifferError: On every worker, where they do not fit together.
        """
        what = f"{'' if part is None else 'a part of '}batch {nth} {self._what}"
        batch = None
        while batch is None:
            try:
                data = take()
            except StopIteration:
                data = None
            may_leave = self._trained is not None and is_first
            batch = self._meet(data, part, what, set_anew, digest, may_leave=may_leave)
            set_anew = ()
        return batch

    def _meet(
        self,
        data: Any,
        part: Part | None,
        what: str,
        own: Places,
        digest: Callable[[list[Any]], str],
        *,
        may_leave: bool,
    ) -> Any:
        """One global batch; None where it would have no rows."""
        shapes = None if data is None else _shapes(data)
        mine = [shapes, _checksum(data, part), is_asked_to_leave(), self._wants_stop()]
        told = processes.exchange([*mine, list(own)], what)
        found, sums, leave, stop, anew = zip(*told, strict=True)
        if any(anew):
            _check_set_alike(anew, digest)
        if any(stop):
            self._trained.stop_training = True
            raise TrainingStopped
        if all(value is None for value in found):
            raise StopIteration
        if any(leave) and may_leave:
            raise errors.PreemptedExit([i for i, leaves in enumerate(leave) if leaves])
        if part is None and any(value != found[0] for value in found):
            raise errors.WorkersDifferError("batches", _in_words(found))
        others = [index for index, value in enumerate(sums) if value != sums[0]]
        if others and None not in found:
            _warn(errors.DifferentBatchesWarning(others))
        return data if part is None else self._joined(data, found, part)

    def _wants_stop(self) -> bool:
        return self._trained is not None and _context.take_held_stop(self._trained)

    def _joined(self, data: Any, found: Sequence[Any], part: Part) -> StepBatch | None:
        """The workers' parts, one after the other, as one batch."""
        if part.may_run_out:
            kinds = next(value for value in found if value is not None)
            empty = [[[0, *shape[1:]], kind] for shape, kind in kinds]
            found = [empty if value is None else value for value in found]
            if data is None:
                data = _without_rows(part.example, empty)
        if any(is_sparse(leaf) for leaf in flatten(data)[0]):
            raise errors.IncompatibleOptionsError(
                'auto_shard="off" or "file"',
                "a sparse batch",
                "Parts of a batch are put together row by row.",
                'Use auto_shard="data", or dense batches.',
            )
        if not _fit_together(found, part):
            raise errors.WorkersDifferError("parts", _in_words(found))
        counts = [value[0][0][0] for value in found]
        if not sum(counts):
            return None
        me = jax.process_index()
        own = None
        if part.keeps_rows:
            own = slice(sum(counts[:me]), sum(counts[: me + 1]))
        leaves, structure = flatten(data)
        leaves = [np.asarray(leaf) for leaf in leaves]
        if _is_laid_out(counts, self._mesh):
            placed = [from_own_rows(leaf, self._mesh, sum(counts)) for leaf in leaves]
            return StepBatch(structure.unflatten(placed), None, True, own)
        whole = prepare(
            structure.unflatten([_all_rows(leaf, counts) for leaf in leaves]),
            self._mesh,
        )
        return StepBatch(whole.data, whole.rows, whole.is_even, own)


def _check_set_alike(anew: Sequence[Any], digest: Callable[[list[Any]], str]) -> None:
    """Variables that were set between two steps must have been on all workers."""
    places = sorted({(k, place) for own in anew for k, place, _ in own})
    told = processes.exchange(digest(places), "variables set between two steps")
    if len(set(told)) > 1:
        words = [
            f"{', '.join(path for *_, path in own[:3]) or 'none'} "
            f"({len(own)} set between two steps)"
            for own in anew
        ]
        raise errors.WorkersDifferError("variables", words)


def _on_host(leaf: Any) -> np.ndarray | None:
    """The array where it takes no transfer to look at it."""
    if isinstance(leaf, jax.Array) and leaf.is_fully_addressable:
        is_here = all(device.platform == "cpu" for device in leaf.devices())
        return np.asarray(leaf) if is_here else None
    return leaf if isinstance(leaf, np.ndarray) else None


def _checksum(data: Any, part: Part | None) -> int:
    """Of a few numbers of each array's first and last row: shuffles show in them."""
    if data is None:
        return 0
    if part is not None:
        return 0 if part.checksum is None else part.checksum()
    found = 0
    for leaf in map(_on_host, flatten(data)[0]):
        if leaf is not None and leaf.size and not leaf.dtype.hasobject:
            for row in (leaf[:1], leaf[-1:]) if leaf.ndim else (leaf,):
                values = row.ravel()
                some = values[:: -(-values.size // _MOST_NUMBERS)]
                found = zlib.crc32(some.tobytes(), found)
    return found


def _is_laid_out(counts: list[int], mesh: Mesh) -> bool:
    """Whether each worker's rows are those of its devices."""
    devices = Counter(device.process_index for device in mesh.devices.flat)
    total = sum(counts)
    return all(
        count * mesh.size == total * devices[worker]
        for worker, count in enumerate(counts)
    ) and not (total % mesh.size)


def _fit_together(found: Sequence[Any], part: Part) -> bool:
    """Whether parts of these shapes make one batch."""
    if any(value is None for value in found):
        return False
    kinds = [[(shape[1:], kind) for shape, kind in value] for value in found]
    rows = [{shape[0] if shape else None for shape, _ in value} for value in found]
    if any(kind != kinds[0] for kind in kinds) or any(len(r) != 1 for r in rows):
        return False
    if not part.shares_order:
        return True
    # The k-th of W parts of n rows, as a worker was asked for it.
    counts = [value[0][0][0] for value in found]
    ends = [(k + 1) * sum(counts) // len(counts) for k in range(len(counts))]
    return list(itertools.accumulate(counts)) == ends


def _without_rows(example: Any, shapes: Any) -> Any:
    """A batch of no rows: a nest like `example`, of arrays of these shapes."""
    arrays = [np.zeros(shape, kind) for shape, kind in shapes]
    return jax.tree.structure(example).unflatten(arrays)


def _all_rows(leaf: np.ndarray, counts: list[int]) -> np.ndarray:
    """Every worker's rows of an array, on every worker."""
    padded = np.zeros((max(counts), *leaf.shape[1:]), leaf.dtype)
    padded[: len(leaf)] = leaf
    parts = processes.gather(padded)
    return np.concatenate([part[:n] for part, n in zip(parts, counts, strict=True)])
