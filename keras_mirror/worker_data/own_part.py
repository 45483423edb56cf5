"""Which rows of each global batch a worker reads, where it need not read all."""

from typing import Any

from keras_mirror._engine import Part
from keras_mirror.worker_data import py_dataset, tf_files, torch_loader


def own_part(data: Any, strategy: Any) -> tuple[Any, Part | None]:
    """What a worker reads of the data that its program names.

    Args:
        data: The `x` of `fit`, `evaluate` or `predict`.
        strategy: A `MultiWorkerMirroredStrategy`.

    Returns:
        The data to read, and how its batches are part of the global ones; None where
        they are the global ones.

    Raises:
        FileShardError: Files are to be shared out, and these data have none to share.
    """
    me, count = strategy.worker_index, strategy.num_workers
    if strategy.auto_shard == "off":
        return data, Part(keeps_rows=True)
    if strategy.auto_shard == "file":
        files = tf_files.own_files(data, me, count)
        return files, Part(keeps_rows=True, may_run_out=True)
    if py_dataset.has_parts(data):
        return py_dataset.OwnRows(data, me, count), Part(shares_order=True)
    if torch_loader.has_parts(data):
        loader = torch_loader.own_rows(data, me, count)
        checksum = lambda: loader.batch_checksum  # noqa: E731
        return loader, Part(shares_order=True, checksum=checksum)
    return data, None
