"""Data parallelism by hand: what a JAX expert writes around a Keras model.

The state lives replicated on every device and is donated to the step. One
`shard_map` holds the whole step; one `pmean` carries everything in which the
replicas differ: gradients, BatchNorm statistics, loss and accuracy. This is the
yardstick for keras_mirror, so nothing in here may be slower than it need be.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXIS = "replica"
# Steps that the host may run ahead of the devices. Without a bound XLA's CPU client
# can deadlock: 32 steps in flight block the thread that a replica needs to reach
# the all-reduce in which the others wait (seen with 4 devices on 2 cores).
MAX_STEPS_AHEAD = 8
REPLICATED = PartitionSpec()
BY_ROWS = PartitionSpec(AXIS)


class State(NamedTuple):
    """Everything that a step changes, replicated over the mesh."""

    trainable: list[jax.Array]
    non_trainable: list[jax.Array]
    optimizer: list[jax.Array]
    # sums over the steps so far: loss, accuracy, steps
    totals: jax.Array


class Loop:
    """A hand-written data-parallel training loop over `model`.

    Args:
        model: a built Keras model, whose weights move into the loop's state.
        optimizer: a Keras optimizer that belongs to nobody else.
        loss: a Keras loss that averages over the batch.
        devices: the devices of the mesh.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        loss: keras.losses.Loss,
        devices: list[jax.Device],
    ):
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self.mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
        self.rows = NamedSharding(self.mesh, BY_ROWS)
        optimizer.build(model.trainable_variables)
        self.state = self._first_state()
        self.step = jax.jit(
            jax.shard_map(
                self._replica_step,
                mesh=self.mesh,
                in_specs=(REPLICATED, BY_ROWS, BY_ROWS),
                out_specs=(REPLICATED, REPLICATED),
                check_vma=False,
            ),
            donate_argnums=0,
        )

    def fit(
        self,
        x: np.ndarray,
        y: np.ndarray,
        batch_size: int,
        *,
        after_step: Callable[[], None] | None = None,
    ) -> dict[str, float]:
        """Trains on each batch of x and y once, in order.

        Args:
            x: inputs, a multiple of `batch_size` rows, in host memory.
            y: integer labels.
            batch_size: rows of a global batch, a multiple of the replicas.
            after_step: called after each step was dispatched.

        Returns:
            The mean loss and accuracy over the batches.
        """
        state = self.state._replace(totals=self._place(np.zeros(3, "float32")))
        running: deque[jax.Array] = deque()
        for start in range(0, len(x), batch_size):
            batch = slice(start, start + batch_size)
            # Dispatch is asynchronous: while the devices run one step, this
            # places the next batch, each device receiving its own rows.
            placed = jax.device_put((x[batch], y[batch]), self.rows)
            state, loss = self.step(state, *placed)
            if after_step is not None:
                after_step()
            running.append(loss)
            if len(running) > MAX_STEPS_AHEAD:
                running.popleft().block_until_ready()
        self.state = state
        loss, accuracy, steps = np.asarray(state.totals)
        return {"loss": float(loss / steps), "accuracy": float(accuracy / steps)}

    def weights(self) -> list[np.ndarray]:
        """The trainable weights, as `model.trainable_weights` orders them."""
        return [np.asarray(value) for value in self.state.trainable]

    def lower(self, x: np.ndarray, y: np.ndarray) -> jax.stages.Lowered:
        """The step lowered for one batch, to look into."""
        return self.step.lower(self.state, *jax.device_put((x, y), self.rows))

    def _first_state(self) -> State:
        def move(variables: list[Any]) -> list[jax.Array]:
            values = [np.array(variable.value) for variable in variables]
            for variable in variables:
                variable.value.delete()  # nothing is held twice
            return [self._place(value) for value in values]

        return State(
            trainable=move(self.model.trainable_variables),
            non_trainable=move(self.model.non_trainable_variables),
            optimizer=move(self.optimizer.variables),
            totals=self._place(np.zeros(3, "float32")),
        )

    def _place(self, value: np.ndarray) -> jax.Array:
        return jax.device_put(value, NamedSharding(self.mesh, REPLICATED))

    def _replica_step(
        self, state: State, x: jax.Array, y: jax.Array
    ) -> tuple[State, jax.Array]:
        # x: [batch/replicas, ...]; y: int32[batch/replicas]
        seeded = fold_replica_index(state.non_trainable)
        forward = jax.value_and_grad(self._loss, has_aux=True)
        (loss, (accuracy, after)), grads = forward(state.trainable, seeded, x, y)
        statistics = [value for value in after if is_statistic(value)]
        grads, statistics, loss, accuracy = jax.lax.pmean(
            (grads, statistics, loss, accuracy), AXIS
        )
        trainable, optimizer = self.optimizer.stateless_apply(
            state.optimizer, grads, state.trainable
        )
        state = State(
            trainable=trainable,
            non_trainable=merge(state.non_trainable, seeded, after, statistics),
            optimizer=optimizer,
            totals=state.totals + jnp.stack([loss, accuracy, jnp.ones_like(loss)]),
        )
        return state, loss

    def _loss(self, trainable: Any, non_trainable: Any, x: jax.Array, y: jax.Array):
        logits, non_trainable = self.model.stateless_call(
            trainable, non_trainable, x, training=True
        )
        accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == y, dtype="float32")
        return self.loss(y, logits), (accuracy, non_trainable)


def is_statistic(value: jax.Array) -> bool:
    """Whether replicas average this value; the others are seed states."""
    return jnp.issubdtype(value.dtype, jnp.floating)


def fold_replica_index(values: list[jax.Array]) -> list[jax.Array]:
    """Gives each replica its own random stream: seeds get its index folded in."""
    replica = jax.lax.axis_index(AXIS)
    return [
        value if is_statistic(value) else jax.random.fold_in(value, replica)
        for value in values
    ]


def merge(
    before: list[jax.Array],
    seeded: list[jax.Array],
    after: list[jax.Array],
    statistics: list[jax.Array],
) -> list[jax.Array]:
    """The non-trainable values that leave the step, equal on all replicas.

    A seed leaves as it came, advanced by as much as the folded one advanced.
    """
    averaged = iter(statistics)
    return [
        next(averaged) if is_statistic(new) else old + (new - folded)
        for old, folded, new in zip(before, seeded, after, strict=True)
    ]
