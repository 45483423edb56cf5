"""Loss denominators in the replica view.

A replica computes the loss of its own rows, and the mean over replicas is taken
afterwards. That is the loss of the whole batch only if every replica divides by
what the whole batch divides by: masks and sample weights make the denominator
differ, and a sum has none.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_mirror._jax import sharded
from keras_mirror._jax.mesh import Axis

_MEANS = ("mean", "sum_over_batch_size")


class ReplicaHooks:
    """What Keras' reductions over the batch become inside one replica."""

    def __init__(self, axis_name: Axis, num_replicas: int):
        self._axis_name = axis_name
        self._num_replicas = num_replicas
        # This server's rows of each table that is split by rows, by its variable's id.
        self.tables: dict[int, jax.Array] = {}

    def lookup(self, original: Callable[..., Any], layer: Any, ids: Any) -> Any:
        """An `Embedding` layer's rows; only those of the batch travel."""
        table = self.tables.get(id(layer._embeddings))
        is_plain = not layer.lora_enabled and layer.quantization_mode is None
        if table is None or not is_plain:
            return original(layer, ids)
        if ids.dtype not in ("int32", "int64"):
            ids = keras.ops.cast(ids, "int32")
        return keras.ops.cast(sharded.rows_of(table, ids), layer.compute_dtype)

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
        valid = jnp.sum(jnp.asarray(mask, dtype))  # of this replica; may be 0
        valid = jax.lax.pmean(valid, self._axis_name)
        total = jnp.asarray(math.prod(mask.shape), dtype)
        return weight * keras.ops.divide_no_nan(total, valid)

    def reduce_values(
        self,
        original: Callable[..., Any],
        values: Any,
        sample_weight: Any,
        reduction: Any,
    ) -> Any:
        """This replica's part; the mean over replicas is the whole batch's value."""
        if tuple(values.shape) in ((), (0,)):
            return original(values, sample_weight, reduction)
        if reduction == "sum":
            return original(values, sample_weight, reduction) * self._num_replicas
        if reduction == "mean_with_sample_weight" and sample_weight is not None:
            divisor = jnp.sum(sample_weight).astype(values.dtype)
            divisor = jax.lax.pmean(divisor, self._axis_name)
            return keras.ops.divide_no_nan(jnp.sum(values), divisor)
        return original(values, sample_weight, reduction)

    def moments(self, original: Callable[..., Any], inputs: Any, mask: Any) -> Any:
        """Statistics of this replica's rows, as tf.distribute has it."""
        return original(inputs, mask)
