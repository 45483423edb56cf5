"""The replica view: forward and backward once per replica, on its own rows.

Everything that a replica computes from its own rows is put together here on
purpose; whatever is forgotten would silently keep one replica's value.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from keras_mirror import _context
from keras_mirror._jax import layouts, random, sharded
from keras_mirror._jax.collectives import (
    combine,
    entering,
    reduce_gradients,
    sum_and_mean,
)
from keras_mirror._jax.compat import shard_map
from keras_mirror._jax.global_view import all_slots
from keras_mirror._jax.losses import ReplicaHooks
from keras_mirror._jax.mesh import Axis, replica_axis
from keras_mirror._jax.server_blocks import WholeWeights, summed_blocks
from keras_mirror._jax.sharded import Layout
from keras_mirror._seeds import is_seed

Step = Callable[[Any, Any], Any]


class _Replica:
    """One replica while it is traced: its index and its parts of the state."""

    def __init__(self, mesh: Mesh):
        self.axis = replica_axis(mesh)
        self.id = jax.lax.axis_index(self.axis)
        self.count = mesh.size

    def context(self) -> _context.ReplicaContext:
        return _context.ReplicaContext(self.id, self.count, self.axis)

    def hooks(self) -> ReplicaHooks:
        return ReplicaHooks(self.axis, self.count)

    def enter(self, variables: list[Any], values: list[Any]) -> list[Any]:
        """What this replica starts from."""
        return [
            random.fold_in(value, self.id)
            if is_seed(variable)
            else entering(value, variable.aggregation, self.id)
            for variable, value in zip(variables, values, strict=True)
        ]

    def leave_seeds(self, variables: list[Any], values: list[Any]) -> list[Any]:
        return [
            random.fold_out(value, self.id) if is_seed(variable) else value
            for variable, value in zip(variables, values, strict=True)
        ]


class _Reduction:
    """What travels between replicas at the end of a step, in one collective."""

    def __init__(self, replica: _Replica):
        self._replica = replica
        self._kept: dict[str, Any] = {}
        self.means: dict[str, Any] = {}
        self.sums: dict[str, Any] = {}

    def add(
        self,
        group: str,
        variables: list[Any],
        old: list[Any],
        entered: list[Any],
        new: list[Any],
    ) -> None:
        """Adds the variables of a group that the step has changed."""
        states = zip(variables, old, entered, new, strict=True)
        for i, (variable, before, begun, after) in enumerate(states):
            # Named by place: all processes must reduce in the same order.
            key = f"{group}/{i}"
            if is_seed(variable):
                continue
            if after is begun:
                self._kept[key] = before
                continue
            how, value = combine(after, variable.aggregation, self._replica.id)
            (self.means if how == "mean" else self.sums)[key] = value

    def run(self) -> None:
        """The collective."""
        self.sums, self.means = sum_and_mean(
            self.sums, self.means, self._replica.axis, self._replica.count
        )

    def values(self, group: str, new: list[Any]) -> list[Any]:
        """The values of the group's variables that all replicas agree on."""
        return [self._value(f"{group}/{i}", value) for i, value in enumerate(new)]

    def _value(self, key: str, value: Any) -> Any:
        for known in (self._kept, self.means, self.sums):
            if key in known:
                return known[key]
        return value


def _region_one(
    model: Any,
    layout: Layout,
    reduction: str,
    trainable: list[Any],
    non_trainable: list[Any],
    optimizer: list[Any],
    metrics: list[Any],
    batch: Any,
) -> Any:
    """Gradients, loss and state of one replica, reduced to those of the batch."""
    x, y, sample_weight = batch  # each leaf: [batch / replicas, ...]
    replica = _Replica(layout.mesh)
    variables = model.non_trainable_variables
    entered = replica.enter(variables, non_trainable)
    entered_metrics = replica.enter(model.metrics_variables, metrics)

    def share_of_loss(*args: Any) -> Any:
        # What this replica's rows contribute to the whole batch's loss: gradients
        # then add up, and inside a replica they are as large as on one device
        # (where float16 overflows, and what a user clips, depends on that).
        *rest, optimizer_variables = args
        loss, aux = model.compute_loss_and_updates(
            *rest, training=True, optimizer_variables=optimizer_variables
        )
        return loss / replica.count, aux

    hooks = replica.hooks()
    weights = WholeWeights(share_of_loss, layout, model.trainable_variables, hooks)
    with _context.replica(replica.context()), _context.hooks(hooks):
        grads, aux, orders = layouts.gradients(
            weights.loss,
            trainable,
            entered,
            entered_metrics,
            x,
            y,
            sample_weight,
            optimizer,
        )
    loss, y_pred, left, new_metrics = aux
    left = weights.unless_set_anew(entered, replica.leave_seeds(variables, left))
    reduced = _Reduction(replica)
    reduced.means["loss"] = loss
    reduced.add("state", variables, non_trainable, entered, left)
    reduced.add(
        "metrics", model.metrics_variables, metrics, entered_metrics, new_metrics
    )
    overwritten, rest = _split_gradients(model, grads, replica.axis)
    blocks, rest = summed_blocks(rest, layout)
    reduced.sums["grads"] = list(map(layouts.before, rest, orders))
    reduced.run()
    rest = list(map(layouts.after, reduced.sums["grads"], orders))
    rest = [blocks.get(i, grad) for i, grad in enumerate(rest)]
    if reduction == "sum":
        rest = [None if grad is None else grad * replica.count for grad in rest]
    return (
        _join_gradients(rest, overwritten),
        reduced.means["loss"],
        y_pred,
        weights.as_blocks(reduced.values("state", left)),
        reduced.values("metrics", new_metrics),
    )


def _split_gradients(
    model: Any, grads: list[Any], axis: Axis
) -> tuple[dict[int, Any], list[Any]]:
    """Takes out what carries values rather than gradients (float8 scales)."""
    overwritten = {
        i: jax.lax.pmax(grads[i], axis)
        for i, variable in enumerate(model.trainable_variables)
        if variable.overwrite_with_gradient
    }
    rest = [None if i in overwritten else g for i, g in enumerate(grads)]
    return overwritten, rest


def _join_gradients(rest: list[Any], overwritten: dict[int, Any]) -> list[Any]:
    return [overwritten.get(i, grad) for i, grad in enumerate(rest)]


def gradient_step(model: Any, layout: Layout, reduction: str) -> Callable[..., Any]:
    """Keras' own train step up to the update, of (state, data).

    Region 1 runs once per replica and ends in the reduction. The metrics see whole
    batches, in the global view, so any of them is right by construction.
    """

    def step(state: Any, data: Any, rows: int | None = None) -> Any:
        trainable, non_trainable, optimizer, metrics = state
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)

        def region_one(*parts: Any) -> Any:
            return _region_one(model, layout, reduction, *parts)

        rows_spec = P(replica_axis(layout.mesh))
        weights, others, gradients = (
            [sharded.spec_of(axis) for axis in axes] or P()
            for axes in (layout.parameters, layout.others, layout.gradients)
        )
        grads, loss, y_pred, non_trainable, metrics = shard_map(
            region_one,
            mesh=layout.mesh,
            in_specs=(weights, others, P(), P(), rows_spec),
            out_specs=(gradients, P(), rows_spec, others, P()),
            check_vma=False,
        )(
            trainable,
            non_trainable,
            all_slots(model, optimizer),
            metrics,
            (x, y, sample_weight),
        )
        logs, metrics = model._update_metrics_variables(
            metrics, loss, x, y, y_pred, sample_weight
        )
        return grads, logs, non_trainable, list(metrics)

    return step


def default_step(model: Any, layout: Layout, reduction: str) -> Step:
    """Keras' own train step in two regions of one program.

    Region 2, the update, is the global view: the optimizer sees whole gradients.
    """
    gradients = gradient_step(model, layout, reduction)

    def step(state: Any, data: Any) -> Any:
        trainable, _, optimizer, _ = state
        grads, logs, non_trainable, metrics = gradients(state, data)
        # A server updates its block of a weight that all of them have whole.
        trainable, optimizer = model.optimizer.stateless_apply(
            optimizer, grads, layout.constrained(trainable, layout.gradients)
        )
        return logs, (list(trainable), non_trainable, list(optimizer), metrics)

    return step


def _merged_logs(model: Any, logs: Any, metrics: list[Any], axis: Axis) -> Any:
    """A user's logs, as they are once the replicas' metrics are put together."""
    pairs = list(zip(model.metrics_variables, metrics, strict=True))
    with keras.StatelessScope(state_mapping=pairs):
        results = model.get_metrics_result()

    def mean(value: Any) -> Any:
        value = jnp.asarray(value)
        value = value if jnp.issubdtype(value.dtype, jnp.inexact) else value * 1.0
        return jax.lax.pmean(value, axis)

    if not isinstance(logs, dict):
        return jax.tree.map(mean, logs)
    return {
        key: results[key] if key in results else jax.tree.map(mean, value)
        for key, value in logs.items()
    }


def custom_step(model: Any, layout: Layout, reduction: str) -> Step:
    """A user's own `train_step`, run whole in each replica; no variable is split.

    Its optimizers reduce gradients before they apply them; metrics, other state and
    logs are put together afterwards.
    """

    mesh = layout.mesh

    def local(state: Any, data: Any) -> Any:
        trainable, non_trainable, optimizer, metrics = state
        replica = _Replica(mesh)
        variables = model.non_trainable_variables
        entered = replica.enter(variables, non_trainable)
        entered_metrics = replica.enter(model.metrics_variables, metrics)
        with (
            _context.replica(replica.context()),
            _context.hooks(replica.hooks()),
            _context.internals().reducing_optimizers(
                model,
                lambda grads, of: reduce_gradients(
                    grads, of, reduction=reduction, axis_name=replica.axis
                ),
            ),
        ):
            logs, new = model.train_step(
                (trainable, entered, optimizer, entered_metrics), data
            )
        trainable, left, optimizer, new_metrics = new
        left = replica.leave_seeds(variables, list(left))
        reduced = _Reduction(replica)
        reduced.add("state", variables, non_trainable, entered, left)
        reduced.add(
            "metrics", model.metrics_variables, metrics, entered_metrics, new_metrics
        )
        reduced.run()
        left = reduced.values("state", left)
        metrics = reduced.values("metrics", list(new_metrics))
        logs = _merged_logs(model, logs, metrics, replica.axis)
        return logs, (trainable, left, optimizer, metrics)

    return shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), P(replica_axis(mesh))),
        out_specs=(P(), P()),
        check_vma=False,
    )
