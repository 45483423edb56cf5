"""Loss denominators in a replica.

Inside of a replica Keras divides a mean by the number of replicas: each replica then
has its share of the loss, and shares add up. That is right where every replica divides
by what the whole batch divides by; masks and sample weights make the denominator
differ.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

_MEANS = ("mean", "sum_over_batch_size")


def _over_replicas(op: str, value: Any) -> Any:
    return tf.distribute.get_replica_context().all_reduce(op, value)


class ReplicaHooks:
    """What Keras' reductions over the batch become inside one replica."""

    def apply_mask(
        self,
        original: Callable[..., Any],
        sample_weight: Any,
        mask: Any,
        dtype: Any,
        reduction: Any,
    ) -> Any:
        """Weights of the unmasked elements, over the whole batch's count of them."""
        if mask is None or reduction not in _MEANS:
            return original(sample_weight, mask, dtype, reduction)
        weight = original(sample_weight, mask, dtype, "sum")
        valid = tf.reduce_sum(tf.cast(mask, dtype))  # of this replica; may be 0
        total = tf.cast(tf.size(mask), dtype)
        return weight * tf.math.divide_no_nan(total, _over_replicas("MEAN", valid))

    def reduce_values(
        self,
        original: Callable[..., Any],
        values: Any,
        sample_weight: Any,
        reduction: Any,
    ) -> Any:
        """This replica's share of the whole batch's value."""
        is_weighted = reduction == "mean_with_sample_weight" and values.shape.rank
        if not is_weighted or sample_weight is None:
            return original(values, sample_weight, reduction)
        divisor = tf.cast(tf.reduce_sum(sample_weight), values.dtype)
        divisor = _over_replicas("SUM", divisor)
        return tf.math.divide_no_nan(tf.reduce_sum(values), divisor)

    def moments(self, original: Callable[..., Any], inputs: Any, mask: Any) -> Any:
        """Statistics of this replica's rows, as tf.distribute has it."""
        return original(inputs, mask)

    def lookup(self, original: Callable[..., Any], layer: Any, ids: Any) -> Any:
        """An `Embedding` layer's rows; every replica has the whole table."""
        return original(layer, ids)


class SynchronizedHooks(ReplicaHooks):
    """The same, with BatchNormalization statistics of the whole batch."""

    def moments(self, original: Callable[..., Any], inputs: Any, mask: Any) -> Any:
        """Mean and variance over the rows of all replicas."""
        mean, variance = original(inputs, mask)
        square = variance + keras.ops.square(mean)
        if mask is None:
            mean, square = (_over_replicas("MEAN", v) for v in (mean, square))
            return mean, square - keras.ops.square(mean)
        weight = tf.reduce_sum(tf.cast(mask, mean.dtype))
        total = _over_replicas("SUM", weight)
        mean, square = (
            tf.math.divide_no_nan(_over_replicas("SUM", v * weight), total)
            for v in (mean, square)
        )
        return mean, square - keras.ops.square(mean)
