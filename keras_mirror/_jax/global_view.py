"""The global view: the one-device program over sharded arrays.

XLA places the collectives. A batch that the replicas do not divide arrives padded;
the padding is sliced off before anything looks at it, so no step, loss or metric
ever sees a row that is not there.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from keras_mirror import _context

# (state, data, rows, layout) -> (outputs, state)
Step = Callable[..., Any]


def real_rows(data: Any, rows: int | None, layout: NamedSharding | None) -> Any:
    """Slices the padding off: [padded, ...] -> [rows, ...].

    Args:
        data: The padded batch.
        rows: How many rows are real; None where there is no padding.
        layout: How the real rows are to lie; None leaves that to XLA.
    """
    if rows is None:
        return data
    data = jax.tree.map(lambda leaf: leaf[:rows], data)
    return data if layout is None else jax.lax.with_sharding_constraint(data, layout)


def has_sort(jaxpr: Any) -> bool:
    """Whether a program sorts, which XLA cannot divide over uneven rows.

    Its partitioner ends the process at the derivative of a sort whose rows the
    devices do not divide (jaxlib 0.10: `Check failed: IsScalarWithElementType`).
    """
    for equation in jaxpr.eqns:
        if equation.primitive.name == "sort":
            return True
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns") and has_sort(inner):
                return True
    return False


def train_step(model: Any, num_replicas: int, reduction: str) -> Step:
    """The model's own train step; with reduction "sum", gradients add up."""

    def scaled(grads: Any, _: Any) -> Any:
        return [None if g is None else g * num_replicas for g in grads]

    def step(
        state: Any, data: Any, rows: int | None, layout: NamedSharding | None = None
    ) -> Any:
        summing = (
            contextlib.nullcontext()
            if reduction == "mean"
            else _context.internals().reducing_optimizers(model, scaled)
        )
        with summing:
            return model.train_step(state, real_rows(data, rows, layout))

    return step


def test_step(model: Any) -> Step:
    """The model's own test step."""

    def step(
        state: Any, data: Any, rows: int | None, layout: NamedSharding | None = None
    ) -> Any:
        return model.test_step(state, real_rows(data, rows, layout))

    return step


def predict_step(model: Any) -> Step:
    """The model's own predict step."""

    def step(
        state: Any, data: Any, rows: int | None, layout: NamedSharding | None = None
    ) -> Any:
        outputs, non_trainable = model.predict_step(
            tuple(state), real_rows(data, rows, layout)
        )
        return outputs, (state[0], non_trainable)

    return step
