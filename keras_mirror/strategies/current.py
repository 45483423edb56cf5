"""Which strategy applies: names, the global switch, and their precedence."""

import os
import warnings
from typing import Any

import keras

from keras_mirror import _context, errors
from keras_mirror.strategies.base import Distribution, Strategy
from keras_mirror.strategies.central_storage import CentralStorageStrategy
from keras_mirror.strategies.mirrored import MirroredStrategy
from keras_mirror.strategies.multi_worker import MultiWorkerMirroredStrategy
from keras_mirror.strategies.one_device import OneDeviceStrategy
from keras_mirror.strategies.parameter_server import ParameterServerStrategy

ENVIRONMENT = "KERAS_MIRROR_STRATEGY"
_CLASSES: dict[str, Any] = {
    cls.name: cls
    for cls in (
        OneDeviceStrategy,
        MirroredStrategy,
        MultiWorkerMirroredStrategy,
        ParameterServerStrategy,
        CentralStorageStrategy,
    )
}


def strategy_names() -> list[str]:
    """The names that stand for a strategy with its default arguments."""
    return sorted(_CLASSES)


def get_strategy_class(name: str, *, source: str = "A strategy") -> Any:
    """The class that `name` stands for.

    Raises:
        UnknownStrategyError: No strategy has this name.
    """
    if name not in _CLASSES:
        raise errors.UnknownStrategyError(name, _CLASSES, source)
    return _CLASSES[name]


def standardize(value: Any, source: str) -> Strategy:
    """A strategy from a strategy or the name of one."""
    if isinstance(value, Strategy):
        return value
    if isinstance(value, str):
        return get_strategy_class(value, source=source)()
    raise errors.StrategyTypeError(value, source)


def _check_not_mixed(strategy: Any) -> None:
    distribution = keras.distribution.distribution()
    if distribution is not None and not isinstance(distribution, Strategy):
        raise errors.MixedDistributionError(strategy, distribution)


def set_strategy(strategy: Strategy | str | None) -> None:
    """Sets the strategy of every model compiled from now on in this process.

    For scripts and notebooks that must not change otherwise. A `compile` argument
    or a scope comes before it. `keras.utils.clear_session()` does not undo it.

    Args:
        strategy: A strategy, the name of one, or None to switch it off.

    Raises:
        UnknownStrategyError: No strategy has this name.
        StrategyTypeError: It is no strategy at all.
        MixedDistributionError: `keras.distribution` has one of another kind.

    Example:

    ```python
    km.set_strategy("mirrored")
    ```
    """
    if strategy is not None:
        strategy = standardize(strategy, "`set_strategy`'s argument")
        _check_not_mixed(strategy)
    _context.set_global(strategy)


def get_strategy() -> Strategy | None:
    """The strategy that a model compiled here and now would be bound to.

    Returns:
        The innermost scope's strategy, else the one of `set_strategy`, else the
        one that the environment variable KERAS_MIRROR_STRATEGY names, else None.

    Raises:
        UnknownStrategyError: The environment names no known strategy.
    """
    scope = _context.innermost_scope()
    if scope is not None:  # of `keras.distribution`: no strategy of ours applies
        return scope if isinstance(scope, Strategy) else None
    if _context.get_global() is not None:
        return _context.get_global()
    distribution = keras.distribution.distribution()
    if isinstance(distribution, Strategy):
        return distribution
    name = os.environ.get(ENVIRONMENT, "")
    if not name:
        return None
    return standardize(name, f"The environment variable {ENVIRONMENT}")


def governing() -> Strategy | None:
    """The strategy that is current here, unless Keras' own distribution governs.

    A scope stands its ground. The switch and the environment, set once for a whole
    program, give way to a `keras.distribution` that was set after them.

    Raises:
        MixedDistributionError: Another kind of distribution inside a scope.
    """
    strategy = get_strategy()
    distribution = keras.distribution.distribution()
    if strategy is None or distribution is None or isinstance(distribution, Strategy):
        return strategy
    if isinstance(_context.innermost_scope(), Strategy):
        raise errors.MixedDistributionError(strategy, distribution)
    warnings.warn(errors.StrategySetAsideWarning(strategy, distribution), stacklevel=4)
    return None


def for_compile(argument: Any) -> Any:
    """What a model compiled with this `distribution` argument is bound to.

    Args:
        argument: What the user passed, None where nothing was.

    Returns:
        A strategy, a `keras.distribution` object that the user passed, or None.

    Raises:
        UnknownStrategyError: The name of no strategy.
        StrategyTypeError: Neither strategy, name nor Keras distribution.
        MixedDistributionError: A strategy beside another kind of distribution.
    """
    if isinstance(argument, Distribution) and not isinstance(argument, Strategy):
        return argument
    if argument is None:
        return governing()
    strategy = standardize(argument, "`compile`'s argument `distribution`")
    _check_not_mixed(strategy)
    return strategy
