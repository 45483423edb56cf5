"""What a model is bound to: decided by `compile`, and where its variables then lie."""

import contextlib
import functools
import inspect
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_mirror import _context, _engine, errors
from keras_mirror.optimizer import DistributedOptimizer
from keras_mirror.strategies import Strategy, for_compile, governing


def binding_target(model: Any) -> Any:
    """What governs a call of `model`: strategy, Keras distribution, or None."""
    binding = _context.binding_of(model)
    if binding is not None:
        return binding.distribution
    # Never compiled: predict follows what is current. Compiled before keras_mirror
    # was there: it stays what it was.
    return None if model.compiled else governing()


def move_model(model: Any, target: Any) -> None:
    """Puts a model's variables where what governs it keeps them."""
    if keras.config.backend() not in _engine.BACKENDS:
        return
    if isinstance(target, Strategy):
        _engine.load().place_model(model, target)
    elif target is not None:
        _engine.load().lay_out(model, target)
    else:
        was_spread = _engine.load().bring_home(model)
        current = keras.distribution.distribution()
        if was_spread and current is not None and not isinstance(current, Strategy):
            _engine.load().lay_out(model, current)


# Models whose variables are the chief's since they were compiled or `fit` began.
_started: "weakref.WeakSet[Any]" = weakref.WeakSet()


def begin_fit(model: Any, target: Any) -> None:
    """Many workers: the order of rows is the chief's, and so will be the weights."""
    _started.discard(model)
    if _context.has_many_workers(target):
        _engine.load().share_random_state()


def start_together(model: Any, target: Any) -> None:
    """Many workers: gives each the chief's variables, once a compile or fit."""
    if _context.has_many_workers(target) and model.built and model not in _started:
        _engine.load().take_from_chief(model)
        _started.add(model)


def compile_under_strategy(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compile(self: Any, *args: Any, distribution: Any = None, **kwargs: Any) -> Any:
        target = for_compile(distribution)
        bound = signature.bind(self, *args, **kwargs)
        wrapper = _wrapper(bound.arguments.get("optimizer"))
        options = _context.ReductionOptions() if wrapper is None else wrapper.options
        _check_options(target, wrapper, bound.arguments)
        with _taken_off(wrapper, bound.arguments):
            result = original(*bound.args, **bound.kwargs)
        if wrapper is not None:
            self.optimizer = _outermost(wrapper, self.optimizer)
        _context.bind(self, _context.Binding(target, options))
        move_model(self, target)
        _started.discard(self)
        start_together(self, target)
        _started.discard(self)  # the optimizer has no slots yet
        return result

    new = inspect.Parameter(
        "distribution", inspect.Parameter.KEYWORD_ONLY, default=None
    )
    compile.__signature__ = signature.replace(  # pyright: ignore
        parameters=[*signature.parameters.values(), new]
    )
    compile.__doc__ = _with_argument(original.__doc__)
    return compile


def _with_argument(doc: str | None) -> str | None:
    if not doc:
        return doc
    text = (
        "            distribution: A keras_mirror strategy, the name of one (such as\n"
        '                `"mirrored"`), or a `keras.distribution` object. None takes\n'
        "                the strategy that is current, if any.\n"
    )
    return re.sub(r"(\n\s+Note:)", "\n" + text.rstrip("\n") + r"\n\1", doc, count=1)


def _wrapper(optimizer: Any) -> DistributedOptimizer | None:
    """The wrapper that the user put around his optimizer, or inside of it."""
    nested = getattr(optimizer, "inner_optimizer", None)
    for found in (optimizer, nested):
        if isinstance(found, DistributedOptimizer):
            return found
    return None


@contextlib.contextmanager
def _taken_off(
    wrapper: DistributedOptimizer | None, arguments: dict[str, Any]
) -> Iterator[None]:
    """Hands Keras the plain optimizer, so that this is what it records.

    A wrapper inside a LossScaleOptimizer is taken out for good, since loss scaling
    must see reduced gradients; a refused compile puts it back.
    """
    if wrapper is None:
        yield
        return
    optimizer = arguments["optimizer"]
    if optimizer is wrapper:
        arguments["optimizer"] = wrapper.inner
        yield
        return
    optimizer.inner_optimizer = wrapper.inner
    try:
        yield
    except BaseException:
        optimizer.inner_optimizer = wrapper
        raise


def _outermost(wrapper: DistributedOptimizer, optimizer: Any) -> DistributedOptimizer:
    """The user's wrapper, or one around what Keras put around his optimizer."""
    if optimizer is wrapper.inner:
        return wrapper
    return DistributedOptimizer(optimizer, reduction=wrapper.options.reduction)


def _check_options(
    target: Any, wrapper: DistributedOptimizer | None, arguments: dict[str, Any]
) -> None:
    reduction = "mean" if wrapper is None else wrapper.options.reduction
    if wrapper is not None and wrapper.axis_name and isinstance(target, Strategy):
        raise errors.IncompatibleOptionsError(
            f"DistributedOptimizer(axis_name={wrapper.axis_name!r})",
            f"distribution={target!r}",
            "A strategy reduces over its own axis.",
            "Leave out axis_name; it is for loops of your own.",
        )
    keras_own = target is not None and not isinstance(target, Strategy)
    if keras_own and reduction != "mean":
        raise errors.IncompatibleOptionsError(
            f"DistributedOptimizer(reduction={reduction!r})",
            f"distribution={target!r}",
            "`keras.distribution` leaves no reduction to choose.",
            "Use a keras_mirror strategy, or the plain optimizer.",
        )
    eager = arguments.get("run_eagerly") or arguments.get("jit_compile") is False
    if eager and getattr(target, "view", None) == "replica":
        raise errors.IncompatibleOptionsError(
            'view="replica"',
            f"run_eagerly={arguments.get('run_eagerly', False)}, "
            f"jit_compile={arguments.get('jit_compile', 'auto')}",
            "The replica view is a compiled program.",
            'Leave out run_eagerly and jit_compile, or use view="auto".',
        )
