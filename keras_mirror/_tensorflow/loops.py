"""What Keras calls as `model.train_function` and its like."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_mirror._tensorflow.steps import StepFunction

_ENDS = (StopIteration, tf.errors.OutOfRangeError)


class _Function:
    """A function with what the plugin asks of it: strategy, step and staleness."""

    def __init__(self, step: StepFunction, function: Callable[[Any], Any]):
        self.step = step
        self.strategy = step.strategy
        self._function = function

    def __call__(self, batches: Any) -> Any:
        return self._function(batches)

    def is_stale(self) -> bool:
        """Whether it was made for another way to run."""
        return False


def over_iterator(step: StepFunction, steps_per_execution: int) -> _Function:
    """Trains or evaluates up to so many batches of an iterator."""

    def function(iterator: Any) -> Any:
        logs = None
        for _ in range(steps_per_execution):
            try:
                data = next(iterator)
            except _ENDS:
                if logs is None:
                    raise StopIteration from None
                break
            logs = step(data)
        return logs

    return _Function(step, function)


def over_list(step: StepFunction) -> _Function:
    """Predicts the batches of a list."""

    def function(batches: list[Any]) -> Any:
        found = [step(data) for data in batches]
        if len(found) == 1:
            return found[0]
        return tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *found)

    return _Function(step, function)
