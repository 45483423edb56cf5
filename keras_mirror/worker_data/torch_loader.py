"""torch's DataLoader: a worker fetches its own rows of each batch where it can."""

import sys
import zlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import keras


def has_parts(data: Any) -> bool:
    """Whether it is a DataLoader whose batches can be fetched in parts.

    The rows must have numbers, and must be put together by torch's own function: one
    of the user's may look at the whole batch.
    """
    torch: Any = sys.modules.get("torch")  # loaded where there is a DataLoader
    if torch is None or type(data) is not torch.utils.data.DataLoader:
        return False
    return (
        not isinstance(data.dataset, torch.utils.data.IterableDataset)
        and data.batch_sampler is not None
        and data.collate_fn is torch.utils.data.default_collate
        and getattr(data, "in_order", True)
    )


class _OwnIndices:
    """A batch sampler: the worker's part of each batch of indices.

    Attributes:
        asked: Of each batch that was asked for and has not come yet: the number of
            rows of the part, and a checksum of the whole batch's indices.
    """

    def __init__(self, batches: Any, part: int, num_parts: int):
        self._batches = batches
        self._part = part
        self._num_parts = num_parts
        self.asked: deque[tuple[int, int]] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Any]]:
        self.asked.clear()
        for indices in self._batches:
            batch = list(indices)
            start = self._part * len(batch) // self._num_parts
            end = (self._part + 1) * len(batch) // self._num_parts
            self.asked.append((end - start, zlib.crc32(repr(batch).encode())))
            # torch cannot put together no rows: one is fetched, and cut off.
            yield batch[start:end] or batch[:1]


def own_rows(loader: Any, part: int, num_parts: int) -> Any:
    """A DataLoader like `loader` that fetches the worker's rows of each batch.

    Args:
        loader: A DataLoader for which `has_parts` holds.
        part: The worker.
        num_parts: How many workers there are.
    """
    import torch

    indices = _OwnIndices(loader.batch_sampler, part, num_parts)

    class OwnRows(torch.utils.data.DataLoader):
        """Keras asks for a DataLoader by its class."""

        def __iter__(self) -> Any:
            for batch in super().__iter__():
                rows, self.batch_checksum = indices.asked.popleft()
                yield batch if rows else keras.tree.map_structure(_none_of, batch)

    names = (
        "num_workers",
        "collate_fn",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
        "generator",
        "prefetch_factor",
        "persistent_workers",
        "pin_memory_device",
    )
    options = {name: getattr(loader, name) for name in names}
    return OwnRows(loader.dataset, batch_sampler=indices, **options)


def _none_of(rows: Any) -> Any:
    return rows[:0]
