"""Files are written by the chief: the other workers see the same values."""

import functools
from collections.abc import Callable
from typing import Any

import keras

from keras_mirror import _context

# These do nothing but write, each batch or epoch, to one path for all workers.
_WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
)


def is_silent_worker(model: Any) -> bool:
    """Whether the model trains with other workers and another one is the chief."""
    strategy = _context.strategy_of_many(model)
    return strategy is not None and not strategy.is_chief


def for_this_worker(model: Any, arguments: dict[str, Any]) -> None:
    """Takes out of the arguments of `fit` and its like what is the chief's alone.

    Args:
        model: Whose call it is.
        arguments: Arguments by name; changed.
    """
    if not is_silent_worker(model):
        return
    if "verbose" in arguments:
        arguments["verbose"] = 0
    callbacks = arguments.get("callbacks")
    if isinstance(callbacks, (list, tuple)):
        kept = [c for c in callbacks if not isinstance(c, _WRITERS)]
        arguments["callbacks"] = kept
    elif isinstance(callbacks, _WRITERS):
        arguments["callbacks"] = None


def chief_only(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a model, or of a callback, that writes files."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = self.model if isinstance(self, keras.callbacks.Callback) else self
        if is_silent_worker(model):
            return None
        return original(self, *args, **kwargs)

    return method
