"""Which strategy applies, to which model, and whether a replica is running.

Three kinds of state live here and nowhere else:

- the strategy that is current: scopes (per thread), `set_strategy` (per process);
- what each model was bound to by `compile`;
- while a step is traced: the replica it is traced for and the hooks that Keras'
  reductions must go through (per thread).
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import keras


@dataclass(frozen=True)
class ReplicaContext:
    """What the code of one replica may know about itself.

    Attributes:
        replica_id: int32 scalar of the backend, `0 <= replica_id < num_replicas`;
            a traced value, different on each replica.
        num_replicas: How many replicas run this code.
        axis_name: Name of the mapped axis, for the backend's own collectives; under
            `MultiWorkerMirroredStrategy` the names of both, which they take alike.
    """

    replica_id: Any
    num_replicas: int
    axis_name: str | tuple[str, ...]


@dataclass(frozen=True)
class ReductionOptions:
    """How gradients are put together; `DistributedOptimizer` documents them."""

    reduction: str = "mean"


@dataclass(frozen=True)
class Binding:
    """What `compile` decided for one model.

    Attributes:
        distribution: A keras_mirror strategy, a `keras.distribution` object, or
            None for plain Keras.
        reduction: Options of the gradient reduction.
    """

    distribution: Any
    reduction: ReductionOptions = ReductionOptions()


class TraceHooks(Protocol):
    """What Keras' own reductions over the batch call while a step is traced."""

    def apply_mask(self, *args: Any, **kwargs: Any) -> Any: ...

    def reduce_values(self, *args: Any, **kwargs: Any) -> Any: ...

    def moments(self, *args: Any, **kwargs: Any) -> Any: ...

    def lookup(self, *args: Any, **kwargs: Any) -> Any: ...


class KerasInternals(Protocol):
    """What the backends need of Keras that Keras does not export.

    `_plugin` is the one file that may look for it and puts it here.
    """

    def has_default_step(self, model: Any) -> bool:
        """Whether training runs Keras' own `train_step` and `compute_loss`."""
        ...

    def is_built(self, model: Any, kind: str) -> bool:
        """Whether a step of this kind makes no more variables."""
        ...

    def build(self, model: Any, data: Any) -> None:
        """Makes all variables of a model, from the shapes of a batch."""
        ...

    def has_batch_norm(self, model: Any) -> bool:
        """Whether the model has a layer with statistics of the batch."""
        ...

    def batch_norm_variables(self, model: Any) -> set[int]:
        """The ids of the moving statistics of its layers of that kind."""
        ...

    def state_variables(self, model: Any, parts: int) -> list[list[Any]]:
        """The variables of a step's state, which has 2, 3 or 4 parts."""
        ...

    def reducing_optimizers(
        self, model: Any, reduce: Callable[[Any, Any], Any]
    ) -> contextlib.AbstractContextManager[None]:
        """While inside, the model's optimizers reduce gradients first."""
        ...


@dataclass
class _Call:
    """A call of a model that is under way, such as "fit", and what ends with it."""

    name: str
    model: Any
    endings: list[Callable[[], None]] = field(default_factory=list)


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.scopes: list[Any] = []
        self.running: list[Any] = []
        self.eager: list[Any] = []
        self.replicas: list[ReplicaContext | None] = []
        self.hooks: list[TraceHooks | None] = []
        self.calls: list[_Call] = []


_thread = _ThreadState()
_bindings: "weakref.WeakKeyDictionary[Any, Binding]" = weakref.WeakKeyDictionary()
_skipped: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
_held_stops: "weakref.WeakSet[Any]" = weakref.WeakSet()
_global_strategy: list[Any] = [None]
_internals: list[KerasInternals] = []


@contextlib.contextmanager
def _pushed(stack: list[Any], value: Any) -> Iterator[None]:
    stack.append(value)
    try:
        yield
    finally:
        stack.pop()


def scope(strategy: Any) -> contextlib.AbstractContextManager[None]:
    """Makes `strategy` the innermost one of this thread."""
    return _pushed(_thread.scopes, strategy)


def innermost_scope() -> Any:
    """The strategy of the innermost scope of this thread, or None."""
    return _thread.scopes[-1] if _thread.scopes else None


def set_global(strategy: Any) -> None:
    """Sets the process-wide strategy; None takes it away."""
    _global_strategy[0] = strategy


def get_global() -> Any:
    """The process-wide strategy, or None."""
    return _global_strategy[0]


def bind(model: Any, binding: Binding) -> None:
    """Remembers what `compile` decided for `model`, as long as it lives."""
    _bindings[model] = binding


def binding_of(model: Any) -> Binding | None:
    """What `model` was bound to, or None when no `compile` was seen."""
    return _bindings.get(model)


def bindings() -> list[tuple[Any, Binding]]:
    """All models that live and what they are bound to."""
    return list(_bindings.items())


def running(strategy: Any) -> contextlib.AbstractContextManager[None]:
    """Marks that a call of a model under `strategy` (or None) is under way."""
    return _pushed(_thread.running, strategy)


def has_many_workers(distribution: Any) -> bool:
    """Whether a strategy spans processes; not so None and `keras.distribution`'s."""
    return getattr(distribution, "num_workers", 1) > 1


def strategy_of_many(model: Any) -> Any:
    """The strategy over many processes that `model` is bound to, or None."""
    binding = binding_of(model)
    found = binding.distribution if binding is not None else None
    return found if has_many_workers(found) else None


def hold_stop(model: Any) -> None:
    """Keeps that a callback has stopped `model`, until all workers know of it."""
    _held_stops.add(model)


def take_held_stop(model: Any) -> bool:
    """Whether a stop was held, which then is no more."""
    was_held = model in _held_stops
    _held_stops.discard(model)
    return was_held


def running_strategy() -> Any:
    """The strategy of the innermost model call of this thread, or None."""
    return _thread.running[-1] if _thread.running else None


@contextlib.contextmanager
def calling(name: str, model: Any) -> Iterator[None]:
    """Marks that a call of a model, such as "fit", is under way."""
    call = _Call(name, model)
    with _pushed(_thread.calls, call):
        try:
            yield
        finally:
            for end in call.endings:
                end()


def when_call_ends(end: Callable[[], None]) -> None:
    """Has the innermost call of a model do this at its end, also where it fails."""
    if _thread.calls:
        _thread.calls[-1].endings.append(end)


def name_of_call() -> str:
    """The innermost call of this thread, such as "fit"; "" outside of one."""
    return _thread.calls[-1].name if _thread.calls else ""


def fitted_model() -> Any | None:
    """The model that the innermost call of this thread fits; None where it does not."""
    return _thread.calls[-1].model if name_of_call() == "fit" else None


def skip_batches(model: Any, count: int) -> None:
    """The model's next epoch leaves out so many batches, trained on before."""
    _skipped[model] = count


def batches_to_skip(model: Any) -> int:
    """What `skip_batches` was told, once."""
    return _skipped.pop(model, 0)


@contextlib.contextmanager
def keras_distribution(value: Any) -> Iterator[None]:
    """While inside, this is what Keras takes for its distribution."""
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(value)
    try:
        yield
    finally:
        keras.distribution.set_distribution(before)


def eager_call(model: Any) -> contextlib.AbstractContextManager[None]:
    """Marks that `model(x)` is under way outside of a step."""
    return _pushed(_thread.eager, model)


def is_in_eager_call() -> bool:
    """Whether a model is being called that has the say over where things lie."""
    return bool(_thread.eager)


def replica(
    context: ReplicaContext | None,
) -> contextlib.AbstractContextManager[None]:
    """Marks that the code of one replica is being traced."""
    return _pushed(_thread.replicas, context)


def replica_context() -> ReplicaContext | None:
    """The replica whose code is running, or None outside of a replica.

    Returns:
        A context with `replica_id`, `num_replicas` and `axis_name` inside
        `strategy.run` and inside a step in the replica view; None elsewhere,
        the global view included.

    Example:

    ```python
    def step(x):  # x: f32[batch / replicas, 8]
        here = km.replica_context()
        return jax.lax.psum(x.sum(), here.axis_name) / here.num_replicas
    ```
    """
    return _thread.replicas[-1] if _thread.replicas else None


def hooks(value: TraceHooks | None) -> contextlib.AbstractContextManager[None]:
    """Sends Keras' reductions over the batch through `value`."""
    return _pushed(_thread.hooks, value)


def current_hooks() -> TraceHooks | None:
    """The hooks of the step that is being traced, or None."""
    return _thread.hooks[-1] if _thread.hooks else None


def provide_internals(value: KerasInternals | None) -> None:
    """Called by the plugin when it is installed; None when it is taken out."""
    _internals[:] = [] if value is None else [value]


def internals() -> KerasInternals:
    """What `provide_internals` was given."""
    return _internals[0]
