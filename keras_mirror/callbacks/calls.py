"""How a list of callbacks is called: not for nothing, and alike on all workers."""

import functools
import re
from collections.abc import Callable
from typing import Any

import keras

from keras_mirror import _context, _engine


def heard_or_spared(name: str) -> Callable[[Any], Any]:
    """Spares a call that no callback listens to.

    Keras fetches the logs and wakes a thread for it, at every step; with nothing
    but History that is a twentieth of the time of a small model's step.
    """
    own_name = re.sub("train_|test_|predict_", "", name)
    # Methods of Keras' base class do nothing. What merely carries its mark (a
    # wrapper that copies attributes, a mock) may do something.
    silent = [vars(keras.callbacks.Callback).get(n) for n in (name, own_name)]

    def is_silent(callback: Any) -> bool:
        methods = (getattr(callback, n, None) for n in (name, own_name))
        return all(getattr(m, "__func__", m) in silent for m in methods)

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(self: Any, batch: Any, logs: Any = None) -> None:
            spared = (
                type(self) is keras.callbacks.CallbackList
                and _context.running_strategy() is not None
                and all(is_silent(callback) for callback in self.callbacks)
            )
            if not spared:
                original(self, batch, logs)
            if name == "on_train_batch_end" and getattr(self, "_km_agrees", False):
                _hold_stop(self.model)

        return call

    return wrap


def _hold_stop(model: Any) -> None:
    """Before the next step the workers tell each other that one wants to stop."""
    if model.stop_training:
        model.stop_training = False
        _context.hold_stop(model)


def agreeing_from_start(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `on_train_begin`: all agree after each batch, or none does."""

    @functools.wraps(original)
    def on_train_begin(self: Any, logs: Any = None) -> None:
        original(self, logs)
        if _context.has_many_workers(_context.running_strategy()):
            # Callbacks on a thread of their own cannot stop a certain step.
            may_stop = not self._async_train
            _context.take_held_stop(self.model)
            self._km_agrees = _engine.load().any_worker(may_stop, "the start of fit")

    return on_train_begin


def agreeing_at_epoch_end(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `on_epoch_end`: what has stopped on one worker stops on all."""

    @functools.wraps(original)
    def on_epoch_end(self: Any, epoch: Any, logs: Any = None) -> None:
        original(self, epoch, logs)
        if _context.has_many_workers(_context.running_strategy()):
            wants = _context.take_held_stop(self.model) or self.model.stop_training
            self.model.stop_training = _engine.load().any_worker(
                bool(wants), "the end of an epoch"
            )

    return on_epoch_end
