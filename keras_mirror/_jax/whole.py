"""Variables of which several processes have parts, whole where Keras looks at them."""

import functools
from typing import Any

import jax
from jax.sharding import NamedSharding

from keras_mirror._jax import processes
from keras_mirror._jax.copies import whole_here


class Whole:
    """The values of a step's state, put together when one is first looked at.

    All processes do it together: those that do not look, where they next wait for
    the others. One variable after the other is whole on the devices for a moment.

    Args:
        parts: The values, over all processes.
        place: Where this process is to have them whole.
    """

    def __init__(self, parts: list[list[jax.Array]], place: NamedSharding):
        self._parts = parts
        self._place = place
        self._found: list[list[Any]] | None = None
        self._number = processes.share(self)

    @property
    def is_known(self) -> bool:
        """Whether they have been put together."""
        return self._found is not None

    def of_part(self, k: int) -> Any:
        """What shows the values of part k."""
        return functools.partial(self._see, k)

    def _see(self, k: int, place: int, value: jax.Array) -> jax.Array:
        if value.sharding.is_fully_replicated:
            return whole_here(value, self._place)
        if self._found is None:
            processes.put_together(self._number)
        assert self._found is not None
        return self._found[k][place]

    def put_together(self) -> None:
        """The collectives, which every process has to run."""
        self._found = [
            [
                None
                if value.sharding.is_fully_replicated
                else whole_here(value, self._place)
                for value in part
            ]
            for part in self._parts
        ]
