"""PyDataset: a worker computes its own rows of each batch where the dataset can."""

from typing import Any

import keras


def has_parts(data: Any) -> bool:
    """Whether it is a PyDataset that can compute a part of a batch."""
    return isinstance(data, keras.utils.PyDataset) and hasattr(data, "get_part")


class OwnRows(keras.utils.PyDataset):
    """The worker's rows of each batch of `dataset`, by its method `get_part`.

    Args:
        dataset: A PyDataset whose `get_part(index, part, num_parts)` returns the rows
            `[part * n // num_parts, (part + 1) * n // num_parts)` of batch `index`,
            which has n rows.
        part: The worker.
        num_parts: How many workers there are.
    """

    def __init__(self, dataset: Any, part: int, num_parts: int):
        super().__init__(
            workers=dataset.workers,
            use_multiprocessing=dataset.use_multiprocessing,
            max_queue_size=dataset.max_queue_size,
        )
        self._dataset = dataset
        self._part = part
        self._num_parts = num_parts

    @property
    def num_batches(self) -> int | None:
        """As many as the dataset has."""
        return self._dataset.num_batches

    def __getitem__(self, index: int) -> Any:
        """The worker's part of batch `index`."""
        return self._dataset.get_part(index, self._part, self._num_parts)

    def on_epoch_begin(self) -> None:
        """Tells the dataset."""
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Tells the dataset."""
        self._dataset.on_epoch_end()
