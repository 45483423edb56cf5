"""tf.data: each worker reads its own files, as tf.distribute shares them out."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np

from keras_mirror import errors


def own_files(dataset: Any, index: int, count: int) -> Any:
    """The dataset over a worker's own files, in its part of the global batch.

    Args:
        dataset: A tf.data.Dataset that reads files; its batch is the global one.
        index: The worker.
        count: How many workers there are.

    Raises:
        FileShardError: It is no such dataset.
    """
    tf: Any = sys.modules.get("tensorflow")  # loaded where there is a dataset
    if tf is None or not isinstance(dataset, tf.data.Dataset):
        raise errors.FileShardError(f"data of type {type(dataset).__name__}")
    specs = tf.nest.flatten(dataset.element_spec)
    if not all(isinstance(spec, tf.TensorSpec) for spec in specs):
        raise errors.FileShardError(f"elements {dataset.element_spec}")
    global_rows = _global_rows(tf, dataset, specs)
    try:
        found = _applied(
            tf,
            tf.raw_ops.AutoShardDataset,
            dataset,
            dataset.element_spec,
            num_workers=count,
            index=index,
            auto_shard_policy=tf.data.experimental.AutoShardPolicy.FILE.value,
        )
    except tf.errors.NotFoundError as error:
        # `enumerate` and `range` are among the sources that it cannot share out.
        found = "a dataset that reads no files, or other sources beside them"
        raise errors.FileShardError(found) from error
    if global_rows > 0:
        found = found.rebatch(_rows_by_step(global_rows, index, count))
    else:
        found = _split(tf, found, count)
    if found.cardinality() >= 0:
        # Keras would end the epoch of each worker after its own number of batches.
        found = found.take_while(lambda *_: True)
    return found.with_options(dataset.options())


def _applied(tf: Any, op: Any, dataset: Any, spec: Any, **more: Any) -> Any:
    """The dataset after an op that tf.data has no method for."""
    specs = tf.nest.flatten(spec)
    variant = op(
        input_dataset=tf.data.experimental.to_variant(dataset),
        output_types=[each.dtype for each in specs],
        output_shapes=[each.shape for each in specs],
        **more,
    )
    return tf.data.experimental.from_variant(variant, spec)


def _global_rows(tf: Any, dataset: Any, specs: list[Any]) -> int:
    """The batch size, where it shows in the shapes or the pipeline; else -1."""
    shape = specs[0].shape
    if shape.rank and shape[0] is not None:
        return shape[0]
    variant = tf.data.experimental.to_variant(dataset)
    return int(tf.raw_ops.ComputeBatchSize(input_dataset=variant))


def _rows_by_step(rows: int, index: int, count: int) -> list[int]:
    """A worker's rows in one step after the other.

    They add up to `rows` over the workers in each step, and over the steps for each
    worker, so that files of one size last equally long.
    """
    parts = [(i + 1) * rows // count - i * rows // count for i in range(count)]
    return parts[index:] + parts[:index]


def _split(tf: Any, dataset: Any, count: int) -> Any:
    """Each batch in as many pieces as there are workers: its size is not known."""

    def any_rows(spec: Any) -> Any:
        shape = spec.shape if spec.shape.rank is None else [None, *spec.shape[1:]]
        return tf.TensorSpec(shape, spec.dtype)

    spec = tf.nest.map_structure(any_rows, dataset.element_spec)
    return _applied(tf, tf.raw_ops.RebatchDataset, dataset, spec, num_replicas=count)


def like_a_batch(dataset: Any) -> Any:
    """Zeros shaped as a batch of the dataset, one where a length is not known."""

    def zeros(spec: Any) -> np.ndarray:
        shape = spec.shape if spec.shape.rank else [None]
        return np.zeros([n or 1 for n in shape], spec.dtype.as_numpy_dtype)

    return keras.tree.map_structure(zeros, dataset.element_spec)


def naming_missing_files(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches; that there are fewer files than workers shows with the first.

    Raises:
        FileShardError: There are.
    """
    try:
        yield from batches
    except Exception as error:
        if "FILE based sharding" not in str(error):
            raise
        detail = str(error).partition("FILE based sharding: ")[2].partition(". ")[0]
        raise errors.FileShardError(f"fewer files than workers ({detail})") from error
