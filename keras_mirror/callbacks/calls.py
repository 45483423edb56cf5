"""How a list of callbacks is called: not for nothing, and alike on all workers."""

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import keras

from keras_mirror import _context, _engine, errors


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
            if name == "on_train_batch_end" and _is_among_workers():
                _hold_stop()

        return call

    return wrap


def _is_among_workers() -> bool:
    """Whether the call that is under way is one of many workers'."""
    return _context.has_many_workers(_context.running_strategy())


def _hold_stop() -> None:
    """Before the next step the workers tell each other that one wants to stop."""
    # Not the list's `model`: Keras would fetch the variables for that.
    model = _context.fitted_model()
    if model is not None and model.stop_training:
        model.stop_training = False
        _context.hold_stop(model)


# Callbacks that wait for all workers.
_TAKING_ALL = {"ConsistencyCheck", "OrbaxCheckpoint", "ShardedCheckpoint"}


def _taking_all(callbacks: Iterable[Any]) -> list[str]:
    """Their names; all workers must have these."""
    classes = (cls.__name__ for callback in callbacks for cls in type(callback).__mro__)
    return [name for name in classes if name in _TAKING_ALL]


def agreeing_from_start(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `on_train_begin`: all have the same steps, and will agree on changes."""

    @functools.wraps(original)
    def on_train_begin(self: Any, logs: Any = None) -> None:
        original(self, logs)
        if not _is_among_workers():
            return
        _context.take_held_stop(self.model)
        asked = [self.params.get("epochs"), self.params.get("steps")]
        rate = learning_rate(self.model)
        own = [asked, rate, _taking_all(self.callbacks)]
        told = _engine.load().exchange(own, "the start of fit")
        counts, rates, common = zip(*told, strict=True)
        if any(count != counts[0] for count in counts):
            words = [f"{epochs} epochs of {steps} steps" for epochs, steps in counts]
            raise errors.WorkersDifferError("steps", words)
        if any(names != common[0] for names in common):
            words = [", ".join(names) or "none" for names in common]
            raise errors.WorkersDifferError("callbacks", words)
        self._km_rate = rates[0]

    return on_train_begin


def agreeing_at_epoch_begin(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `on_epoch_begin`: a learning rate set on one worker is that of all."""

    @functools.wraps(original)
    def on_epoch_begin(self: Any, epoch: Any, logs: Any = None) -> None:
        original(self, epoch, logs)
        if _is_among_workers():
            _agree(self, False, "the beginning of an epoch")

    return on_epoch_begin


def agreeing_at_epoch_end(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `on_epoch_end`: so is what has stopped on one worker."""

    @functools.wraps(original)
    def on_epoch_end(self: Any, epoch: Any, logs: Any = None) -> None:
        original(self, epoch, logs)
        if _is_among_workers():
            held = _context.take_held_stop(self.model)
            wants = bool(held or self.model.stop_training)
            self.model.stop_training = _agree(self, wants, "the end of an epoch")

    return on_epoch_end


def learning_rate(model: Any) -> float | None:
    """Where it is a variable; None where a schedule says it, or there is none."""
    optimizer = getattr(model, "optimizer", None)
    while hasattr(optimizer, "inner_optimizer") or hasattr(optimizer, "inner"):
        name = "inner" if hasattr(optimizer, "inner") else "inner_optimizer"
        optimizer = getattr(optimizer, name)
    rate = getattr(optimizer, "_learning_rate", None)
    return float(rate) if isinstance(rate, keras.Variable) else None


def _agree(callback_list: Any, stops: bool, what: str) -> bool:
    """Whether a worker stops; and what one has set as learning rate is set on all.

    Raises:
        WorkersDifferError: Two workers have set different ones.
    """
    model = callback_list.model
    own = learning_rate(model)
    told = _engine.load().exchange([stops, own], what)
    rates = [rate for _, rate in told]
    changed = [rate for rate in rates if rate != callback_list._km_rate]
    if len(set(map(repr, changed))) > 1:  # of text: NaN is unequal to itself
        raise errors.WorkersDifferError("learning rate", rates)
    agreed = changed[0] if changed else callback_list._km_rate
    if agreed is not None and agreed != own:
        model.optimizer.learning_rate = agreed
    callback_list._km_rate = agreed
    return any(stop for stop, _ in told)
