"""What Keras saves to Orbax checkpoints, and loads, where many workers train."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_mirror import _context


def as_numpy_for_many_workers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `_get_state_tree`, which gives Orbax the state of a model.

    Orbax refuses arrays of one process' devices where there are more processes. NumPy
    arrays it takes from the chief, and they can be read on any number of devices.
    """

    @functools.wraps(original)
    def state_tree(model: Any) -> Any:
        found = original(model)
        if _context.strategy_of_many(model) is None:
            return found
        return keras.tree.map_structure(keras.ops.convert_to_numpy, found)

    return state_tree


def loading_as_numpy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `build_orbax_abstract_pytree`, which says how arrays are to be loaded.

    Under a strategy as NumPy arrays, whatever devices they were saved from: each
    variable then lays out its own.
    """

    @functools.wraps(original)
    def abstract(*args: Any, **kwargs: Any) -> Any:
        strategy = _current_strategy()
        if strategy is None:
            return original(*args, **kwargs)
        with _context.keras_distribution(strategy):  # else Keras leaves it to Orbax
            found = original(*args, **kwargs)
        return keras.tree.map_structure(lambda x: np.empty(x.shape, x.dtype), found)

    return abstract


def _current_strategy() -> Any:
    """The current one, or the one of many workers that any model is bound to."""
    current = _context.innermost_scope() or _context.get_global()
    spread = (_context.strategy_of_many(model) for model, _ in _context.bindings())
    return current or next(filter(None, spread), None)
