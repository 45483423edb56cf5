"""The global view: the one-device program over sharded arrays.

XLA places the collectives. A batch that the replicas do not divide arrives padded;
the padding is sliced off before anything looks at it, so no step, loss or metric
ever sees a row that is not there.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax

from keras_mirror import _context


def real_rows(data: Any, rows: int | None) -> Any:
    """Slices the padding off: [padded, ...] -> [rows, ...]."""
    if rows is None:
        return data
    return jax.tree.map(lambda leaf: leaf[:rows], data)


def train_step(
    model: Any, num_replicas: int, reduction: str
) -> Callable[[Any, Any, int | None], Any]:
    """The model's own train step; with reduction "sum", gradients add up."""

    def scaled(grads: Any, _: Any) -> Any:
        return [None if g is None else g * num_replicas for g in grads]

    def step(state: Any, data: Any, rows: int | None) -> Any:
        summing = (
            contextlib.nullcontext()
            if reduction == "mean"
            else _context.internals().reducing_optimizers(model, scaled)
        )
        with summing:
            return model.train_step(state, real_rows(data, rows))

    return step


def test_step(model: Any) -> Callable[[Any, Any, int | None], Any]:
    """The model's own test step."""

    def step(state: Any, data: Any, rows: int | None) -> Any:
        return model.test_step(state, real_rows(data, rows))

    return step


def predict_step(model: Any) -> Callable[[Any, Any, int | None], Any]:
    """The model's own predict step."""

    def step(state: Any, data: Any, rows: int | None) -> Any:
        outputs, non_trainable = model.predict_step(tuple(state), real_rows(data, rows))
        return outputs, (state[0], non_trainable)

    return step
