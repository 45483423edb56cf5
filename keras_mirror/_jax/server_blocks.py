"""The replica view of a step whose variables are split over servers.

Weights come as blocks and are put together where the loss needs them; gradients leave
as blocks.
"""

from collections.abc import Callable
from typing import Any

import jax

from keras_mirror._jax import sharded
from keras_mirror._jax.losses import ReplicaHooks
from keras_mirror._jax.sharded import Layout


class WholeWeights:
    """A loss of whole weights, as one of the blocks that this replica's server has.

    The backward pass puts weights together again, so that no more than those in use
    lie whole on a device. Their gradients leave it as blocks of the sum over servers.
    Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter
    models", 2020.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        layout: Layout,
        variables: list[Any],
        hooks: ReplicaHooks,
    ):
        self._function = function
        self._layout = layout
        self._variables = variables
        self._hooks = hooks
        # Split variables that the model has set anew: they leave it whole.
        self._set_anew: set[int] = set()

    @property
    def loss(self) -> Callable[..., Any]:
        """What to differentiate."""
        layout = self._layout
        if all(axis is None for axis in (*layout.parameters, *layout.others)):
            return self._function
        return jax.checkpoint(self._of_blocks, policy=sharded.not_kept)

    def _of_blocks(self, trainable: Any, others: Any, *rest: Any) -> Any:
        layout = self._layout
        # A layer that looks up rows reads these, and what is put together of a table
        # for others to read is then read by nobody, and falls away.
        self._hooks.tables = {
            id(variable): block
            for variable, block, axis in zip(
                self._variables, trainable, layout.parameters, strict=True
            )
            if axis == 0 and block.ndim == 2
        }
        whole = list(map(sharded.gathered, others, layout.others))
        value, (loss, y_pred, left, metrics) = self._function(
            list(map(sharded.gathered, trainable, layout.parameters)), whole, *rest
        )
        for i, axis in enumerate(layout.others):
            if axis is not None and left[i] is not whole[i]:
                self._set_anew.add(i)
        return value, (loss, y_pred, left, metrics)

    def unless_set_anew(self, entered: list[Any], left: list[Any]) -> list[Any]:
        """The variables that leave the loss; of those unchanged, the block."""
        return [
            entered[i] if axis is not None and i not in self._set_anew else left[i]
            for i, axis in enumerate(self._layout.others or [None] * len(left))
        ]

    def as_blocks(self, values: list[Any]) -> list[Any]:
        """The variables as this replica's server keeps them."""
        return [
            sharded.own_block(value, self._layout.others[i])
            if i in self._set_anew
            else value
            for i, value in enumerate(values)
        ]


def summed_blocks(
    grads: list[Any], layout: Layout
) -> tuple[dict[int, jax.Array], list[Any]]:
    """Takes out the gradients of which each server gets a block, summed."""
    blocks, whole = {}, {}
    for i, axis in enumerate(layout.gradients):
        if axis is None or grads[i] is None:
            continue
        if layout.parameters[i] is None:
            whole[i] = axis
        else:  # scattered by the gather's derivative
            blocks[i] = sharded.mirrored_sum(grads[i])
    arguments = [grads[i] for i in whole], list(whole.values())
    if layout.is_in_one:
        sums = sharded.scattered_sums(*arguments)
    else:
        sums = list(map(sharded.scattered_sum, *arguments))
    blocks |= dict(zip(whole, sums, strict=True))
    return blocks, [None if i in blocks else grad for i, grad in enumerate(grads)]
