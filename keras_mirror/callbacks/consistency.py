"""Checks that all copies of the variables stay equal."""

from typing import Any

import keras

from keras_mirror import _engine, errors


def check_count(name: str, value: object) -> None:
    """Raises OptionValueError unless the value is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise errors.OptionKindError(name, value, "a whole number of at least 1")


def check_consistency(model: Any) -> None:
    """Compares a checksum of every variable over all replicas and workers.

    Use it where numbers drift apart and you want to know where it begins. Many
    workers must all call it.

    Args:
        model: A model whose variables are mirrored.

    Raises:
        InconsistentVariableError: A variable differs; the first one is named, with
            the replicas and workers that differ from the chief's first.

    Cost: every variable is fetched to the host; workers exchange a few bytes.

    Example:

    ```python
    model.fit(x, y)
    km.check_consistency(model)
    ```
    """
    _engine.load().check_consistency(model)


class ConsistencyCheck(keras.callbacks.Callback):
    """Calls `check_consistency` every few steps of training.

    Args:
        every_steps: How many steps lie between two checks.

    Raises:
        OptionValueError: `every_steps` is no whole number of at least 1.

    Example:

    ```python
    model.fit(x, y, callbacks=[km.ConsistencyCheck(every_steps=100)])
    ```
    """

    def __init__(self, *, every_steps: int = 100):
        super().__init__()
        check_count("every_steps", every_steps)
        self.every_steps = every_steps
        self._steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts steps, and checks."""
        self._steps += 1
        if self._steps % self.every_steps == 0:
            check_consistency(self.model)
