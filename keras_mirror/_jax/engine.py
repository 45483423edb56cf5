"""What the rest of keras_mirror calls on the JAX backend."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from keras_mirror import _context
from keras_mirror._engine import Estimate, Holding, Part, StepReport, model_variables
from keras_mirror._jax import (
    batch,
    central,
    checkpoints,
    collectives,
    compat,
    consistency,
    global_view,
    loops,
    memory,
    mesh,
    preemption,
    processes,
    report,
    run,
    sharded,
    state,
    steps,
    worker_batches,
)


def _last(outputs: list[Any]) -> Any:
    return outputs[-1]


def _concatenated(outputs: list[Any]) -> Any:
    if len(outputs) == 1:
        return outputs[0]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)


def _step_kinds(strategy: Any) -> tuple[Any, Any, Any]:
    """What trains, evaluates and predicts."""
    if sharded.is_central(strategy):
        return (
            central.CentralTrainFunction,
            central.CentralTestFunction,
            central.CentralPredictFunction,
        )
    return steps.TrainFunction, steps.StepFunction, steps.PredictFunction


class JaxEngine:
    """See `keras_mirror._engine.Engine` for what each method is for."""

    def local_devices(self) -> list[str]:
        return mesh.local_devices()

    def all_devices(self) -> list[str]:
        return mesh.all_devices()

    def host_devices(self) -> list[str]:
        return mesh.host_devices()

    def join(self, membership: Any, **options: Any) -> tuple[int, int]:
        processes.join(membership, **options)
        return jax.process_count(), jax.process_index()

    def take_from_chief(self, model: Any) -> None:
        state.take_from_chief(model_variables(model))

    def share_random_state(self) -> None:
        processes.share_random_state()

    def exchange(self, value: Any, what: str) -> list[Any]:
        return processes.exchange(value, what)

    def tell_failure(self, error: BaseException) -> None:
        processes.tell_failure(error)

    def fit_context(self, strategy: Any) -> contextlib.AbstractContextManager[Any]:
        return preemption.watched()

    def check_consistency(self, model: Any) -> None:
        consistency.check(model_variables(model))

    def make_mesh(
        self, devices: Sequence[str], *, by_worker: bool, num_servers: int | None
    ) -> Any:
        return mesh.make_mesh(devices, by_worker=by_worker, num_servers=num_servers)

    def place_model(self, model: Any, strategy: Any) -> None:
        variables = model_variables(model)
        shardings = sharded.variable_shardings(model, strategy, variables)
        state.spread(variables, shardings)

    def place_inputs(self, inputs: Any, strategy: Any) -> Any:
        return batch.place_inputs(inputs, sharded.place_of_calls(strategy))

    def call_context(self, strategy: Any) -> contextlib.AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        stack.enter_context(compat.own_mesh(strategy.mesh))
        if mesh.spans_processes(strategy.mesh):
            stack.enter_context(worker_batches.warning_once())
        return stack

    def bring_home(self, model: Any) -> bool:
        return state.bring_home(model_variables(model))

    def lay_out(self, model: Any, distribution: Any) -> None:
        state.lay_out(model_variables(model), distribution)

    def train_function(self, model: Any, strategy: Any) -> Callable[..., Any]:
        binding = _context.binding_of(model)
        reduction = binding.reduction.reduction if binding else "mean"
        kind, _, _ = _step_kinds(strategy)
        step = kind(model, strategy, reduction)
        return loops.over_iterator(
            step, model.steps_per_execution, _last, what="to train on"
        )

    def test_function(self, model: Any, strategy: Any) -> Callable[..., Any]:
        _, kind, _ = _step_kinds(strategy)
        step = kind(
            model,
            strategy,
            global_view.test_step(model, sharded.layout_inside(model, strategy)),
        )
        return loops.over_iterator(
            step, model.steps_per_execution, _last, what="to evaluate"
        )

    def predict_function(self, model: Any, strategy: Any) -> Callable[..., Any]:
        _, _, kind = _step_kinds(strategy)
        step = kind(
            model,
            strategy,
            global_view.predict_step(model, sharded.layout_inside(model, strategy)),
        )
        return loops.over_iterator(
            step, model.steps_per_execution, _concatenated, what="to predict"
        )

    def batches(
        self,
        batches: Iterable[Any],
        strategy: Any,
        *,
        may_be_reused: bool,
        must_be_even: bool = False,
        part: Part | None = None,
    ) -> Iterator[Any]:
        return batch.Batches(
            batches,
            strategy.mesh,
            may_be_reused=may_be_reused,
            must_be_even=must_be_even,
            part=part,
        )

    def run(self, strategy: Any, fn: Any, args: Any, kwargs: Any) -> Any:
        return run.run(strategy.mesh, fn, args, kwargs)

    def reduce(self, strategy: Any, op: str, value: Any, axis: Any) -> Any:
        return run.reduce(op, value, axis)

    def gather(self, strategy: Any, value: Any, axis: int) -> Any:
        return run.gather(value, axis)

    def checkpoint_arrays(self, model: Any, strategy: Any) -> dict[str, Any]:
        return checkpoints.arrays(model, strategy)

    def checkpoint_templates(self, model: Any, strategy: Any) -> dict[str, Any]:
        return checkpoints.templates(model, strategy)

    def take_checkpoint(
        self, model: Any, strategy: Any, values: Mapping[str, Any]
    ) -> None:
        checkpoints.take(model, strategy, values)

    def holdings(self, model: Any, strategy: Any) -> list[Holding]:
        return memory.holdings(model, strategy)

    def estimates(
        self, model: Any, strategy: Any, batch_size: int
    ) -> Iterable[Estimate]:
        return memory.estimates(model, strategy, batch_size)

    def reduce_gradients(
        self, grads: Any, variables: Any, *, reduction: str, axis_name: str | None
    ) -> Any:
        return collectives.reduce_gradients(
            grads, variables, reduction=reduction, axis_name=axis_name
        )

    def step_report(
        self, model: Any, x: Any, y: Any = None, sample_weight: Any = None
    ) -> StepReport:
        model._symbolic_build(data_batch=(x, y, sample_weight))
        model.make_train_function()
        step = model.train_function.step
        strategy = step.strategy
        placed = batch.prepare((x, y, sample_weight), strategy.mesh)
        groups = _context.internals().state_variables(model, 4)
        values = [[v.value for v in group] for group in groups]
        lowered, view = step.lower(values, placed)
        compiled = lowered.compile()
        text, memory_use = compiled.as_text(), compiled.memory_analysis()
        number, sent = report.count(text, strategy.num_replicas_in_sync)
        return StepReport(
            number,
            sent,
            view,
            text,
            argument_bytes=memory_use.argument_size_in_bytes,
            temporary_bytes=memory_use.temp_size_in_bytes,
        )


engine = JaxEngine()
