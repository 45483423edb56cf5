"""Steps of a model whose variables lie in one place, away from where it computes.

A step copies what it needs to the devices that compute and brings gradients back; the
optimizer runs where the variables are. Only there are slots ever held.
"""

from collections.abc import Callable
from typing import Any

import jax
import keras

from keras_mirror import _context
from keras_mirror._jax import global_view, replica_view
from keras_mirror._jax.batch import StepBatch
from keras_mirror._jax.mesh import by_rows, replicated
from keras_mirror._jax.state import PlacedState
from keras_mirror._jax.steps import PredictFunction, StepFunction, TrainFunction


class _Central(StepFunction):
    """Copies the state there and back around a step that does not train."""

    # Where the storage device computes too, its copy is the variable itself.
    _donated = ()

    def _program(self, state: PlacedState, batch: StepBatch) -> tuple[Any, ...]:
        found = super()._program(state, batch)
        if not self._is_compiled:
            return found
        program, lists, *rest = found
        mesh, home = replicated(self._mesh), self.layout.home

        def there_and_back(lists: Any, *rest: Any) -> Any:
            outputs, new = program(jax.device_put(lists, mesh), *rest)
            # The trainable variables are as they were, and are still here.
            return outputs, (lists[0], *jax.device_put(tuple(new[1:]), home))

        return there_and_back, lists, *rest


class CentralTestFunction(_Central):
    """Evaluates."""


class CentralPredictFunction(_Central, PredictFunction):
    """Predicts."""


class CentralTrainFunction(TrainFunction):
    """Trains: gradients where the rows are, the update where the variables are."""

    _donated = ()  # the copies; the update takes the variables

    def __init__(self, model: Any, strategy: Any, reduction: str):
        super().__init__(model, strategy, reduction)
        self._gradients: dict[tuple[str, bool], Any] = {}
        self._update = jax.jit(self._updated, donate_argnums=(0, 2))

    def _program(self, state: PlacedState, batch: StepBatch) -> tuple[Any, ...]:
        found = super()._program(state, batch)
        if not self._is_compiled:
            return found
        program, lists, *rest = found
        if _context.internals().has_default_step(self._model):
            has_whole_rows = program is self._whole_rows
            gradients = self.gradients(self.view(state, batch), has_whole_rows)
            return self._in_two(gradients), lists, batch.data, batch.rows
        mesh, home = replicated(self._mesh), self.layout.home

        def whole(lists: Any, *rest: Any) -> Any:
            # A step of the user's own: nobody knows where in it the update is.
            outputs, new = program(jax.device_put(lists, mesh), *rest)
            return outputs, jax.device_put(tuple(new), home)

        return whole, lists, *rest

    def _in_two(self, gradients: Any) -> Callable[..., Any]:
        mesh, home = replicated(self._mesh), self.layout.home

        def step(lists: Any, data: Any, rows: int | None) -> Any:
            trainable, others, slots, metrics = lists
            few = few_slots(self._model, slots)
            copies = jax.device_put((trainable, others, few, metrics), mesh)
            grads, outputs, *new = gradients(copies, data, rows)
            grads, others, metrics = jax.device_put((grads, *new), home)
            trainable, slots = self._update(slots, grads, trainable)
            return outputs, (trainable, others, slots, metrics)

        return step

    def gradients(self, view: str, has_whole_rows: bool = False) -> Any:
        """(state, data, rows) -> (gradients, logs, non-trainable, metrics)."""
        key = view, has_whole_rows
        if key not in self._gradients:
            whole = replicated(self._mesh)
            arguments = self._model, self.layout, self._reduction
            options: dict[str, Any] = {"static_argnums": 2, "out_shardings": whole}
            if view == "replica":
                step = replica_view.gradient_step(*arguments)
                options["in_shardings"] = (whole, by_rows(self._mesh))
            else:
                rows_as = whole if has_whole_rows else None
                step = global_view.gradient_step(*arguments, rows_as=rows_as)
            self._gradients[key] = jax.jit(step, **options)
        return self._gradients[key]

    def _updated(self, slots: Any, grads: Any, trainable: Any) -> Any:
        optimizer = self._model.optimizer
        trainable, slots = optimizer.stateless_apply(slots, grads, trainable)
        return list(trainable), list(slots)

    def lower(self, values: Any, batch: StepBatch) -> tuple[Any, str]:
        """The program of the devices that compute, and its view."""
        view = self.view(values, batch)
        trainable, others, slots, metrics = values
        state = trainable, others, few_slots(self._model, slots), metrics
        whole = replicated(self._mesh)
        arguments = jax.tree.map(
            lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=whole), state
        )
        program = self.gradients(view)
        return program.lower(arguments, batch.data, batch.rows), view


def few_slots(model: Any, slots: Any) -> list[Any]:
    """What the loss may need of the optimizer: of Keras' own, its scale alone.

    None in the place of a slot that nobody reads, and that is not copied.
    """
    optimizer = getattr(model.optimizer, "inner", model.optimizer)
    known = (
        keras.optimizers.Optimizer.scale_loss,
        keras.optimizers.LossScaleOptimizer.scale_loss,
    )
    if type(optimizer).scale_loss not in known:
        return list(slots)
    return [slot if slot.size == 1 else None for slot in slots]
