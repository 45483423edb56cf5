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
        binding = _context.binding_of(model)
        strategy = binding.distribution if binding is not None else None
        if not _context.has_many_workers(strategy):
            return found
        return keras.tree.map_structure(keras.ops.convert_to_numpy, found)

    return state_tree


def numpy_for_many_workers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `build_orbax_abstract_pytree`, which says how arrays are to be loaded.

    Whatever devices they were saved from: as NumPy arrays, which each worker then lays
    out on its own.
    """

    @functools.wraps(original)
    def abstract(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if not _context.has_many_workers(keras.distribution.distribution()):
            return found
        return keras.tree.map_structure(lambda x: np.empty(x.shape, x.dtype), found)

    return abstract
