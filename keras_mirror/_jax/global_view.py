"""The global view: the one-device program over sharded arrays.

XLA places the collectives. A batch that the replicas do not divide arrives padded;
the padding is sliced off before anything looks at it, so no step, loss or metric
ever sees a row that is not there.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.sharding import NamedSharding

from keras_mirror import _context
from keras_mirror._jax import equations
from keras_mirror._jax.sharded import Layout

# (state, data, rows, rows_as) -> (outputs, state)
Step = Callable[..., Any]


def real_rows(data: Any, rows: int | None, rows_as: NamedSharding | None) -> Any:
    """Slices the padding off: [padded, ...] -> [rows, ...].

    Args:
        data: The padded batch.
        rows: How many rows are real; None where there is no padding.
        rows_as: How the real rows are to lie; None leaves that to XLA.
    """
    if rows is None:
        return data
    data = jax.tree.map(lambda leaf: leaf[:rows], data)
    if rows_as is None:
        return data
    return jax.lax.with_sharding_constraint(data, rows_as)


def has_sort(jaxpr: Any) -> bool:
    """Whether a program sorts, which XLA cannot divide over uneven rows.

    Its partitioner ends the process at the derivative of a sort whose rows the
    devices do not divide (jaxlib 0.10: `Check failed: IsScalarWithElementType`).
    """
    return any(each.primitive.name == "sort" for each in equations.all_of(jaxpr))


def _whole(state: Any, layout: Layout) -> tuple[Any, ...]:
    """The state of which no weight is split; the optimizer's and metrics as they are.

    Only the layout changes. XLA puts a weight together where it is first used.
    """
    if not layout.is_split:
        return tuple(state)
    trainable, non_trainable, *rest = state
    return (
        layout.constrained(trainable, layout.parameters, are_whole=True),
        layout.constrained(non_trainable, layout.others, are_whole=True),
        *rest,
    )


def _as_lists(state: Any) -> tuple[list[Any], ...]:
    return tuple(list(part) for part in state)


def train_step(model: Any, num_replicas: int, reduction: str, layout: Layout) -> Step:
    """The model's own train step; with reduction "sum", gradients add up."""

    def scaled(grads: Any, _: Any) -> Any:
        return [None if g is None else g * num_replicas for g in grads]

    def step(
        state: Any, data: Any, rows: int | None, rows_as: NamedSharding | None = None
    ) -> Any:
        summing = (
            contextlib.nullcontext()
            if reduction == "mean"
            else _context.internals().reducing_optimizers(model, scaled)
        )
        with summing:
            logs, state = model.train_step(
                _whole(state, layout), real_rows(data, rows, rows_as)
            )
        return logs, _as_lists(state)

    return step


def gradient_step(
    model: Any, layout: Layout, reduction: str, *, rows_as: NamedSharding | None
) -> Step:
    """Keras' own train step up to the update: gradients, logs and other state."""
    factor = 1 if reduction == "mean" else layout.mesh.size

    def step(state: Any, data: Any, rows: int | None) -> Any:
        trainable, others, slots, metrics = state
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(
            real_rows(data, rows, rows_as)
        )
        differentiated = jax.grad(model.compute_loss_and_updates, has_aux=True)
        grads, aux = differentiated(
            trainable,
            others,
            metrics,
            x,
            y,
            sample_weight,
            training=True,
            optimizer_variables=all_slots(model, slots),
        )
        loss, y_pred, others, metrics = aux
        logs, metrics = model._update_metrics_variables(
            metrics, loss, x, y, y_pred, sample_weight
        )
        grads = [None if grad is None else grad * factor for grad in grads]
        return grads, logs, list(others), list(metrics)

    return step


def all_slots(model: Any, slots: Any) -> list[Any]:
    """The optimizer's variables; zeros for those that nobody reads."""
    return [
        jnp.zeros(variable.shape, variable.dtype) if slot is None else slot
        for variable, slot in zip(model.optimizer.variables, slots, strict=True)
    ]


def test_step(model: Any, layout: Layout) -> Step:
    """The model's own test step."""

    def step(
        state: Any, data: Any, rows: int | None, rows_as: NamedSharding | None = None
    ) -> Any:
        logs, state = model.test_step(
            _whole(state, layout), real_rows(data, rows, rows_as)
        )
        return logs, _as_lists(state)

    return step


def predict_step(model: Any, layout: Layout) -> Step:
    """The model's own predict step."""

    def step(
        state: Any, data: Any, rows: int | None, rows_as: NamedSharding | None = None
    ) -> Any:
        outputs, non_trainable = model.predict_step(
            _whole(state, layout), real_rows(data, rows, rows_as)
        )
        return outputs, _as_lists((state[0], non_trainable))

    return step
