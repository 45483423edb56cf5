"""What Keras' OrbaxCheckpoint saves where many workers train."""

import functools
from collections.abc import Callable
from typing import Any

import keras

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
