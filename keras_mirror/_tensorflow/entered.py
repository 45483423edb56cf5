"""The state that a replica starts from, and what it leaves to be added up."""

from typing import Any

import tensorflow as tf

from keras_mirror._seeds import STRIDE, is_seed


def other_variables(model: Any) -> list[Any]:
    """What a step of `model` may change beside weights and slots."""
    return [*model.non_trainable_variables, *model.metrics_variables]


class Entered:
    """The state that a replica starts from, and what it has made of it."""

    def __init__(self, model: Any, index: Any):
        self.trainable = [tf.identity(v.value) for v in model.trainable_variables]
        self._index = index
        self._variables = other_variables(model)
        self._entered = [self._enter(v) for v in self._variables]
        pairs = zip(model.trainable_variables, self.trainable, strict=True)
        self.mapping = [*pairs, *zip(self._variables, self._entered, strict=True)]

    def _enter(self, variable: Any) -> Any:
        value = tf.identity(variable.value)
        if is_seed(variable):
            return value + self._offset()
        if variable.aggregation == "sum":
            # So that the sum is right whether a replica adds to it or sets it anew.
            return tf.where(self._is_first(), value, tf.zeros_like(value))
        return value

    def _is_first(self) -> Any:
        return tf.equal(self._index, 0)

    def _offset(self) -> Any:
        shift = tf.cast(self._index, "int64") * STRIDE % 2**32
        return tf.stack([shift, tf.zeros((), "int64")])

    def left(self, scope: Any) -> dict[int, Any]:
        """The values that have changed, by place, as they are to be added up."""
        found = {}
        for place, (variable, old) in enumerate(
            zip(self._variables, self._entered, strict=True)
        ):
            new = scope.get_current_value(variable)
            if new is None or new is old:
                continue
            new = tf.convert_to_tensor(new)
            if is_seed(variable):
                # The counter has advanced alike in all.
                new = self._of_first(new - self._offset())
            elif variable.aggregation == "sum":
                pass
            elif variable.aggregation != "only_first_replica" and (
                new.dtype.is_floating
            ):
                count = tf.distribute.get_strategy().num_replicas_in_sync
                new = new / tf.cast(count, new.dtype)
            else:
                new = self._of_first(new)
            found[place] = new
        return found

    def has_other_weights(self, scope: Any) -> bool:
        """Whether the forward pass has assigned to what it is differentiated by."""
        pairs = self.mapping[: len(self.trainable)]
        return any(scope.get_current_value(v) is not value for v, value in pairs)

    def _of_first(self, value: Any) -> Any:
        return tf.where(self._is_first(), value, tf.zeros_like(value))
