"""How the calls of a model run: under what governs it, and what they leave behind."""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import keras

from keras_mirror import _context, _engine, callbacks, errors
from keras_mirror._binding import (
    begin_fit,
    binding_target,
    move_model,
    start_together,
)
from keras_mirror.strategies import Strategy


def _during_call(target: Any) -> contextlib.AbstractContextManager[Any]:
    """What must hold while Keras runs a call of a model governed by `target`."""
    current = keras.distribution.distribution()
    stack = contextlib.ExitStack()
    if isinstance(target, Strategy):
        if current is not None and not isinstance(current, Strategy):
            raise errors.MixedDistributionError(target, current)
        stack.enter_context(_context.running(target))
        stack.enter_context(_engine.load().call_context(target))
        return stack
    stack.enter_context(_context.running(None))
    if target is not None:
        stack.enter_context(_context.keras_distribution(target))
    elif isinstance(current, Strategy):
        # A plain model called inside a scope: Keras must not see our strategy.
        stack.enter_context(_context.keras_distribution(None))
    return stack


def _step_of(model: Any, kind: str | None) -> Any:
    """The step that trains, tests or predicts; None where no strategy made one."""
    return getattr(getattr(model, f"{kind}_function", None), "step", None)


def _end_steps(model: Any, error: BaseException | None = None) -> None:
    for kind in ("train", "test", "predict"):
        step = _step_of(model, kind)
        if step is not None:
            step.end(error)


_KIND_OF = {"fit": "train", "evaluate": "test", "predict": "predict"}


def holding_what_is_purged(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `_purge_model_variables`: until the first step only `fit` has the values.

    Ctrl-C before it would leave the model without variables.
    """

    @functools.wraps(original)
    def purge(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = _step_of(self, _KIND_OF.get(_context.name_of_call()))
        if step is not None:
            step.hold()
        return original(self, *args, **kwargs)

    return purge


def noting_what_is_handed_out(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `jax_state_sync`: what is set afterwards, on one worker alone, is seen."""

    @functools.wraps(original)
    def sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        was_there = getattr(self, "_jax_state_synced", True)
        result = original(self, *args, **kwargs)
        step = None if was_there else _step_of(self, "train")
        if step is not None:
            step.note_what_is_handed_out()
        return result

    return sync


def _recover(
    model: Any, target: Any, error: BaseException, used_callbacks: Any
) -> None:
    """After an error the model has its variables, and other workers know of it."""
    if not isinstance(target, Strategy):
        return
    _end_steps(model, error)
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()
    theirs = (
        errors.WorkersDifferError,
        errors.WorkerFailedError,
        errors.LateWorkerError,
        errors.PreemptedExit,
        errors.InconsistentVariableError,
    )
    if isinstance(error, errors.PreemptedExit):
        print(f"keras_mirror: {error.message}", file=sys.stderr, flush=True)
        callbacks.save_before_leaving(used_callbacks)
    is_own = not isinstance(error, theirs) and not hasattr(error, "_km_told")
    if _context.has_many_workers(target) and is_own:
        _engine.load().tell_failure(error)
        # Once: an `evaluate` within a `fit` is a call as well.
        with contextlib.suppress(AttributeError):
            error._km_told = True  # pyright: ignore[reportAttributeAccessIssue]


def call_under_strategy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `fit` and its like."""
    name, signature = original.__name__, inspect.signature(original)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _context.replica_context() is not None:
            raise errors.RunArgumentError(
                f"`{name}` spreads over the replicas itself, so it must "
                "be called outside of a replica.",
                self,
            )
        target = binding_target(self)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_during_call(target))
            stack.enter_context(_context.calling(name, self))
            several = _context.has_many_workers(target)
            used_callbacks = None
            try:
                if name == "fit":
                    begin_fit(self, target)
                    if several:
                        stack.enter_context(_engine.load().fit_context(target))
                if several:
                    bound = signature.bind(self, *args, **kwargs)
                    bound.apply_defaults()
                    callbacks.for_this_worker(self, bound.arguments)
                    used_callbacks = bound.arguments.get("callbacks")
                    args, kwargs = bound.args[1:], bound.kwargs
                found = original(self, *args, **kwargs)
                if several and not name.endswith("_on_batch"):
                    # So that what a callback raises at the very end is heard of.
                    _engine.load().exchange(None, f"the end of {name}")
                _end_steps(self)
                return found
            except BaseException as error:
                _recover(self, target, error, used_callbacks)
                if type(error).__name__ != "IndivisibleError":
                    raise
                raise errors.IndivisibleBatchError(target, error) from error

    return call


def _mark(function: Any) -> None:
    """Tells a function that Keras made from one of the user's own."""
    if function is not None and not hasattr(function, "strategy"):
        with contextlib.suppress(AttributeError):
            function.strategy = None


def make_function(kind: str) -> Callable[[Any], Any]:
    """Wraps `make_train_function` and its like: the step that a call runs."""
    attribute = f"{kind}_function"

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(self: Any, force: bool = False) -> Any:
            target = binding_target(self)
            existing = getattr(self, attribute, None)
            move_model(self, target)
            start_together(self, target)
            if existing is not None and not hasattr(existing, "strategy"):
                return original(self, force)  # the user's own: Keras keeps it
            strategy = target if isinstance(target, Strategy) else None
            if existing is not None and (
                existing.strategy is not strategy
                or getattr(existing, "is_stale", bool)()
            ):
                setattr(self, attribute, None)
            if strategy is None:
                result = original(self, force)
                _mark(getattr(self, attribute, None))
                return result
            if force or getattr(self, attribute, None) is None:
                function = getattr(_engine.load(), attribute)(self, strategy)
                setattr(self, attribute, function)
            return None

        return make

    return wrap
