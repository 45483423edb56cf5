"""What the rest of keras_mirror calls on the TensorFlow backend."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_mirror import _context, errors
from keras_mirror._engine import Estimate, Holding, Part, StepReport, model_variables
from keras_mirror._tensorflow import devices, loops, steps


class TensorFlowEngine:
    """See `keras_mirror._engine.Engine` for what each method is for."""

    def local_devices(self) -> list[str]:
        return devices.local_devices()

    def all_devices(self) -> list[str]:
        return devices.local_devices()

    def host_devices(self) -> list[str]:
        return devices.host_devices()

    def join(self, membership: Any, **options: Any) -> tuple[int, int]:
        if membership is not None and membership.num_workers != 1:
            raise errors.UnsupportedOnBackendError("Training in several processes")
        return 1, 0

    def take_from_chief(self, model: Any) -> None:
        """There is one process."""

    def share_random_state(self) -> None:
        """There is one process."""

    def exchange(self, value: Any, what: str) -> list[Any]:
        return [value]

    def tell_failure(self, error: BaseException) -> None:
        """There is one process."""

    def fit_context(self, strategy: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def check_consistency(self, model: Any) -> None:
        """Every variable lies in one place."""

    def make_mesh(
        self, names: Sequence[str], *, by_worker: bool, num_servers: int | None
    ) -> Any:
        if num_servers is not None:
            raise errors.UnsupportedOnBackendError("ParameterServerStrategy")
        return devices.native(names)

    def place_model(self, model: Any, strategy: Any) -> None:
        home = steps.home_of(strategy)
        for variable in model_variables(model):
            value = getattr(variable, "_value", None)
            if isinstance(value, tf.Variable) and not devices.same_place(value, home):
                variable._value = devices.moved(value, home)

    def place_inputs(self, inputs: Any, strategy: Any) -> Any:
        return inputs

    def call_context(self, strategy: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def bring_home(self, model: Any) -> bool:
        return False

    def lay_out(self, model: Any, distribution: Any) -> None:
        """`keras.distribution` does nothing on TensorFlow."""

    def train_function(self, model: Any, strategy: Any) -> Callable[..., Any]:
        binding = _context.binding_of(model)
        reduction = binding.reduction.reduction if binding else "mean"
        step = steps.TrainFunction(model, strategy, reduction)
        return loops.over_iterator(step, model.steps_per_execution)

    def test_function(self, model: Any, strategy: Any) -> Callable[..., Any]:
        step = steps.TestFunction(model, strategy)
        return loops.over_iterator(step, model.steps_per_execution)

    def predict_function(self, model: Any, strategy: Any) -> Callable[..., Any]:
        return loops.over_list(steps.PredictFunction(model, strategy))

    def batches(
        self,
        batches: Iterable[Any],
        strategy: Any,
        *,
        may_be_reused: bool,
        must_be_even: bool = False,
        part: Part | None = None,
    ) -> Iterator[Any]:
        raise errors.UnsupportedOnBackendError("`distribute_dataset`")

    def run(self, strategy: Any, fn: Any, args: Any, kwargs: Any) -> Any:
        raise errors.UnsupportedOnBackendError("`strategy.run`")

    def reduce(self, strategy: Any, op: str, value: Any, axis: Any) -> Any:
        raise errors.UnsupportedOnBackendError("`strategy.reduce`")

    def gather(self, strategy: Any, value: Any, axis: int) -> Any:
        raise errors.UnsupportedOnBackendError("`strategy.gather`")

    def step_report(
        self, model: Any, x: Any, y: Any = None, sample_weight: Any = None
    ) -> StepReport:
        raise errors.UnsupportedOnBackendError("A report of the compiled step")

    def checkpoint_arrays(self, model: Any, strategy: Any) -> dict[str, Any]:
        raise errors.UnsupportedOnBackendError("ShardedCheckpoint")

    def checkpoint_templates(self, model: Any, strategy: Any) -> dict[str, Any]:
        raise errors.UnsupportedOnBackendError("ShardedCheckpoint")

    def take_checkpoint(
        self, model: Any, strategy: Any, values: Mapping[str, Any]
    ) -> None:
        raise errors.UnsupportedOnBackendError("ShardedCheckpoint")

    def holdings(self, model: Any, strategy: Any) -> list[Holding]:
        raise errors.UnsupportedOnBackendError("`strategy.summary`")

    def estimates(
        self, model: Any, strategy: Any, batch_size: int
    ) -> Iterable[Estimate]:
        raise errors.UnsupportedOnBackendError("`strategy.estimate`")

    def reduce_gradients(
        self, grads: Any, variables: Any, *, reduction: str, axis_name: str | None
    ) -> Any:
        """Gradients as they came, outside of a replica of tf.distribute."""
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return list(grads)
        op = "MEAN" if reduction == "mean" else "SUM"
        there = [grad for grad in grads if grad is not None]
        reduced = iter(context.all_reduce(op, there))
        return [None if grad is None else next(reduced) for grad in grads]


engine = TensorFlowEngine()
