"""What a backend does for a strategy, and the one place that picks the backend."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import keras

from keras_mirror import errors

# Keras backend -> module that has an `engine` object.
BACKENDS = {
    "jax": "keras_mirror._jax.engine",
    "tensorflow": "keras_mirror._tensorflow.engine",
}


@dataclass(frozen=True)
class StepReport:
    """What the compiled train step of a model sends between devices.

    Attributes:
        collectives: Number of collective operations per step.
        bytes_sent: Bytes that each device sends per step.
        view: "replica" or "global".
        text: The compiled program, for readers who want to look further.
        argument_bytes: Bytes on each device of the state and the batch.
        temporary_bytes: Bytes that each device needs beside them during a step.
    """

    collectives: int
    bytes_sent: int
    view: str
    text: str
    argument_bytes: int = 0
    temporary_bytes: int = 0


@dataclass(frozen=True)
class Holding:
    """Where a variable lies.

    Attributes:
        path: The variable's.
        kind: "weight", "non-trainable weight", "slot" or "metric".
        shape: Of the whole variable.
        dtype: Of its elements.
        place: In words.
        bytes_per_device: Of each device, how many bytes of it lie there.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    place: str
    bytes_per_device: tuple[int, ...]


@dataclass(frozen=True)
class Estimate:
    """Bytes that training takes on each device.

    Attributes:
        shard: What is split; None for mirrored variables.
        parameters: All weights.
        gradients: Of the trainable ones, between backward pass and update.
        slots: The optimizer's variables.
        activations: What the backward pass keeps of the forward pass.
    """

    shard: str | None
    parameters: int
    gradients: int
    slots: int
    activations: int

    @property
    def total(self) -> int:
        """All of these."""
        return self.parameters + self.gradients + self.slots + self.activations


class TrainingStopped(Exception):
    """A worker wants to stop: raised on all before the same step."""


@dataclass(frozen=True)
class Part:
    """How a worker's batches are part of the global ones.

    Attributes:
        keeps_rows: Whether `predict` returns a worker the rows that it brought, and
            not those of all.
        shares_order: Whether the parts make one batch only where all workers go
            through the batches in one order.
        checksum: Of the whole batch of which the last part was; equal on all workers
            that go through the batches alike. None where that cannot be told.
        may_run_out: Whether a worker that has no more batches takes part with no
            rows until none has any.
        example: With `may_run_out`, a batch of zeros, for a worker that has none.
    """

    keeps_rows: bool = False
    shares_order: bool = False
    checksum: Callable[[], int] | None = None
    may_run_out: bool = False
    example: Any = None


def model_variables(model: Any) -> list[Any]:
    """All variables that a step of `model` reads or writes, once each."""
    optimizer = getattr(model, "optimizer", None)
    found = list(model.variables)
    found += list(getattr(model, "metrics_variables", []))
    found += list(optimizer.variables) if optimizer is not None else []
    unique = {id(v): v for v in found}
    return list(unique.values())


class Engine(Protocol):
    """The jobs of a backend. `strategy` has `devices`, `view` and `mesh`."""

    def local_devices(self) -> list[str]:
        """Names of this process' devices of the default kind, as "cpu:0"."""
        ...

    def all_devices(self) -> list[str]:
        """Names of the devices of all processes, by process."""
        ...

    def host_devices(self) -> list[str]:
        """Names of the devices of this process that compute in host memory."""
        ...

    def join(
        self,
        membership: Any,
        *,
        timeout_seconds: int,
        heartbeat_seconds: int,
        runtime_options: Mapping[str, Any],
    ) -> tuple[int, int]:
        """Meets the other workers; returns how many there are and which this is."""
        ...

    def take_from_chief(self, model: Any) -> None:
        """Gives every worker the chief's variables of a model."""
        ...

    def share_random_state(self) -> None:
        """Gives every worker the chief's state of the random generators."""
        ...

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Every worker's value, which JSON can hold; all must ask, in one order."""
        ...

    def tell_failure(self, error: BaseException) -> None:
        """Lets the other workers know that this one has failed."""
        ...

    def fit_context(self, strategy: Any) -> contextlib.AbstractContextManager[Any]:
        """What must hold during `fit` of many workers: SIGTERM is seen."""
        ...

    def check_consistency(self, model: Any) -> None:
        """Raises InconsistentVariableError unless all copies are equal."""
        ...

    def make_mesh(
        self, devices: Sequence[str], *, by_worker: bool, num_servers: int | None
    ) -> Any:
        """The backend's mesh over `devices`.

        It has one axis, or (worker, device), or (mirror, server).
        """
        ...

    def place_model(self, model: Any, strategy: Any) -> None:
        """Moves a model's variables to where `strategy` keeps them."""
        ...

    def place_inputs(self, inputs: Any, strategy: Any) -> Any:
        """Moves arrays to where a model under `strategy` can be called on them."""
        ...

    def call_context(self, strategy: Any) -> contextlib.AbstractContextManager[Any]:
        """What must hold while a model under `strategy` is trained or called."""
        ...

    def bring_home(self, model: Any) -> bool:
        """Moves variables that a strategy spread back; says whether any was."""
        ...

    def lay_out(self, model: Any, distribution: Any) -> None:
        """Gives variables the layout of a `keras.distribution` object."""
        ...

    def train_function(self, model: Any, strategy: Any) -> Callable[..., Any]: ...

    def test_function(self, model: Any, strategy: Any) -> Callable[..., Any]: ...

    def predict_function(self, model: Any, strategy: Any) -> Callable[..., Any]: ...

    def batches(
        self,
        batches: Iterable[Any],
        strategy: Any,
        *,
        may_be_reused: bool,
        must_be_even: bool = False,
        part: Part | None = None,
    ) -> Iterator[Any]:
        """Puts batches where the step wants them, ahead of the step."""
        ...

    def run(self, strategy: Any, fn: Any, args: Any, kwargs: Any) -> Any: ...

    def reduce(self, strategy: Any, op: str, value: Any, axis: Any) -> Any: ...

    def gather(self, strategy: Any, value: Any, axis: int) -> Any: ...

    def step_report(
        self, model: Any, x: Any, y: Any = None, sample_weight: Any = None
    ) -> StepReport:
        """Compiles the bound model's train step for a batch and counts."""
        ...

    def checkpoint_arrays(self, model: Any, strategy: Any) -> dict[str, Any]:
        """A model's weights and slots as arrays over all processes, by name."""
        ...

    def checkpoint_templates(self, model: Any, strategy: Any) -> dict[str, Any]:
        """Shape, dtype and layout of these."""
        ...

    def take_checkpoint(
        self, model: Any, strategy: Any, values: Mapping[str, Any]
    ) -> None:
        """Assigns such arrays to the variables of a model."""
        ...

    def holdings(self, model: Any, strategy: Any) -> list[Holding]:
        """Where `strategy` keeps each variable that a model has now."""
        ...

    def estimates(
        self, model: Any, strategy: Any, batch_size: int
    ) -> Iterable[Estimate]:
        """What training a model takes, for each choice of what is split."""
        ...

    def reduce_gradients(
        self, grads: Any, variables: Any, *, reduction: str, axis_name: str | None
    ) -> Any:
        """Puts gradients together where a replica axis is bound."""
        ...


@functools.cache
def _load(backend: str) -> Engine:
    import importlib

    if backend not in BACKENDS:
        raise errors.UnsupportedBackendError(backend, sorted(BACKENDS))
    return importlib.import_module(BACKENDS[backend]).engine


def load() -> Engine:
    """The engine of the backend that Keras runs on.

    Raises:
        UnsupportedBackendError: keras_mirror has none for this backend.
    """
    return _load(keras.config.backend())
