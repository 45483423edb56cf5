"""A model's compiled steps: which view runs, and the calling of it."""

import collections
import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras

from keras_mirror import _context, errors
from keras_mirror._engine import Part, model_variables
from keras_mirror._jax import (
    fingerprint,
    global_view,
    processes,
    replica_view,
    report,
    turns,
)
from keras_mirror._jax.batch import Batches, StepBatch, prepare
from keras_mirror._jax.copies import lowered
from keras_mirror._jax.independence import why_rows_mix
from keras_mirror._jax.mesh import by_rows, replicated, spans_processes
from keras_mirror._jax.sharded import is_compiled, layout_inside, layout_of
from keras_mirror._jax.state import (
    PlacedState,
    on_one_device,
    place_state,
    placed,
    references,
    set_anew,
)
from keras_mirror._jax.worker_batches import WorkerBatches

# On CPU devices one pool of threads both starts and runs programs. With 32 steps
# in flight the starting of the next can hold the thread that a collective of an
# earlier step waits for, and all stand still (jaxlib 0.10, fewer cores than twice
# the devices). Eight are far more than it takes to overlap placing and computing;
# each wait costs a change of threads, so one wait is for several steps.
_MOST_STEPS_AHEAD = 8
_STEPS_PER_WAIT = 4

# Errors after which no worker takes part in anything, or none may be waited for.
_NOBODY_TO_ASK = (
    KeyboardInterrupt,
    SystemExit,
    errors.LateWorkerError,
    errors.WorkerFailedError,
    jax.errors.JaxRuntimeError,
)

_log = logging.getLogger("keras_mirror")


class StepFunction:
    """One step of a model over a placed batch, compiled where Keras compiles.

    Attributes:
        layout: Where the variables lie.

    Args:
        model: The model, bound to `strategy`.
        strategy: Where to run.
        step: The step in the global view, a `global_view.Step`.
    """

    # Of the state: trainable and non-trainable variables, and metrics.
    _parts = 3
    # The arguments whose memory a program may use for its results.
    _donated: int | tuple[int, ...] = 0

    def __init__(self, model: Any, strategy: Any, step: Callable[..., Any]):
        self.strategy = strategy
        self._model = model
        self._mesh = strategy.mesh
        self.layout = layout_of(model, strategy)
        # The newest state: what a call that is broken off leaves to the model.
        self.latest: PlacedState | tuple[list[Any], ...] | None = None
        # The arrays that Keras has put into the variables between two steps.
        self._handed_out: dict[int, Any] = {}
        # What Keras has seen last of variables that other processes have parts of.
        self._held: tuple[list[Any], ...] | None = None
        self._spans = spans_processes(self._mesh)
        self._turn = object()
        # Whether the epoch's earlier batches were trained on before a restart.
        self.is_resumed = False
        self._in_flight: collections.deque[Any] | None = None
        if self._mesh.size > 1 and self._mesh.devices.flat[0].platform == "cpu":
            self._in_flight = collections.deque()
        self._is_compiled = is_compiled(model)
        self._irregular = self._global = step
        if self._is_compiled:
            options = {"static_argnums": 2, "out_shardings": self._out_shardings()}
            self._irregular = jax.jit(step, donate_argnums=self._donated, **options)
            options["in_shardings"] = self._in_shardings()
            self._global = jax.jit(step, donate_argnums=self._donated, **options)
            whole = functools.partial(step, rows_as=replicated(self._mesh))
            self._whole_rows = jax.jit(whole, donate_argnums=self._donated, **options)
        self._sorts: dict[Any, bool] = {}
        self._traced: set[Any] = set()
        # Told where workers differ; during a call Keras has taken the values away.
        self._settings = fingerprint.settings(model) if self._spans else []

    def _in_shardings(self) -> Any:
        # Of a state that is split: as it comes.
        state = None if self.layout.is_split else replicated(self._mesh)
        return (state, by_rows(self._mesh))

    def _out_shardings(self) -> Any:
        return (replicated(self._mesh), self._state_out())

    def _state_out(self) -> Any:
        """Where the new state lies."""
        if not self.layout.is_split:
            return replicated(self._mesh)
        groups = _context.internals().state_variables(self._model, self._parts)
        return self.layout.of_state([len(group) for group in groups])

    def _program(self, state: PlacedState, batch: StepBatch) -> tuple[Any, ...]:
        """What to call, and the arguments."""
        if not self._is_compiled:
            return self._op_by_op, state, batch
        program = self.global_jit(batch)
        arguments = (state.lists(), batch.data, batch.rows)
        if batch.rows is not None:
            key = (batch.signature(), batch.rows)
            if key not in self._sorts:
                traced = program.trace(*arguments)
                self._sorts[key] = global_view.has_sort(traced.jaxpr)
            if self._sorts[key]:
                program = self._whole_rows
        return program, *arguments

    def _op_by_op(self, state: PlacedState, batch: StepBatch) -> Any:
        """The step on one device, by each process for itself, as plain Keras runs it.

        Its values can be looked at in every process. And on CPU devices operations
        over several, each a program of its own, would be far ahead of a collective
        (see _MOST_STEPS_AHEAD).
        """
        lists, data = on_one_device(state, batch.data, self._mesh)
        outputs, new_state = self._global(lists, data, batch.rows)
        return outputs, place_state(new_state, self.layout)

    def global_jit(self, batch: StepBatch) -> Any:
        """The step of the global view for batches laid out as this one is."""
        return self._global if batch.is_by_rows else self._irregular

    def __call__(self, state: Any, data: Any) -> Any:
        """Runs one step; a failed one leaves the model with the state it had."""
        state = place_state(state, self.layout)
        self.latest = state
        done: list[Any] = []
        try:
            batch = prepare(data, self._mesh)
            # The variables are named by position in the state, and a model that
            # calls another model inside its step must not bind that one.
            with _context.running(self.strategy):
                # By way of `map`, which keeps the result without a line of Python in
                # between: Ctrl-C there would lose the state, the old one donated.
                done.extend(map(*self._each_once(state, batch)))
            outputs, new_state = done[0]
            self.latest = placed(new_state, self.layout)
            if self._spans:
                if self._is_compiled:
                    turns.note(outputs, self._turn)
                    outputs = jax.tree.map(lambda v: lowered(v, self._mesh), outputs)
                outputs = self._for_this_worker(outputs, batch)
            self._wait_for_earlier_steps(outputs)
        except BaseException as error:
            if done:
                self.latest = placed(done[0][1], self.layout)
            self.give_back(self.latest, error)
            raise
        return outputs, self.latest

    def _each_once(self, state: PlacedState, batch: StepBatch) -> Iterator[Any]:
        program, *arguments = self._program(state, batch)
        if self._spans:
            self._agree_on(program, arguments, batch)
        if self._spans and self._is_compiled:
            turns.wait(self._turn)
        return itertools.chain([program], ([argument] for argument in arguments))

    def _agree_on(self, program: Any, arguments: list[Any], batch: StepBatch) -> None:
        """What workers do not agree on must be known before any of them is in it."""
        key = (program, batch.signature(), batch.rows)
        if key not in self._traced:
            own = "a step that is not compiled"
            if self._is_compiled:
                own = fingerprint.of(program.trace(*arguments).jaxpr)
            told = processes.exchange(own, "the first of its kind of steps")
            if len(set(told)) > 1:
                own = [own, self._settings]
                told = processes.exchange(own, "what it was compiled with")
                raise errors.WorkersDifferError("step", fingerprint.differing(told))
            self._traced.add(key)

    def _for_this_worker(self, outputs: Any, batch: StepBatch) -> Any:
        return outputs

    def is_stale(self) -> bool:
        """Whether the model has other variables now than those it was made for."""
        return self.layout != layout_of(self._model, self.strategy)

    def note_what_is_handed_out(self) -> None:
        """Called where Keras has put the state into the variables."""
        if self._spans:
            self._handed_out = references(model_variables(self._model))

    def set_anew(self, state: Any) -> list[list[Any]]:
        """Which values of a state were set since Keras has seen the variables.

        Metrics are left out: Keras resets them at each epoch.
        """
        if isinstance(state, PlacedState) or not self._handed_out:
            return []
        groups = _context.internals().state_variables(self._model, self._parts)
        return set_anew(groups[:3], state[:3], self._handed_out)

    def worker_batches(self, what: str) -> WorkerBatches | None:
        """How batches are taken where other processes have a part of the mesh."""
        if not self._spans:
            return None
        return WorkerBatches(self._mesh, what, self._trained())

    def _trained(self) -> Any:
        """The model where the step trains it, else None."""
        return None

    def logs_so_far(self, state: Any) -> Any:
        """What to log without a step."""
        raise NotImplementedError

    def part(self, iterator: Any) -> Part | None:
        """How a worker's batches are part of the global ones; None: they are those."""
        if isinstance(iterator, Batches):
            return iterator.part
        # What `train_on_batch` and its like were given.
        return Part(keeps_rows=True) if self.strategy.auto_shard == "off" else None

    def give_back(self, state: Any, error: BaseException | None = None) -> None:
        """Hands state back to the model's variables where a call has failed.

        Where other processes have parts of it and cannot be asked for them, the
        variables get the values that Keras has seen last.
        """
        whole = getattr(state, "whole", None)
        if whole is not None and not whole.is_known:
            if not isinstance(error, _NOBODY_TO_ASK):
                with contextlib.suppress(errors.KerasMirrorError):
                    _give_back(self._model, state)
                    return
            state = self._held
        if state is not None:
            _give_back(self._model, state)

    def hold(self) -> None:
        """Keeps the model's values, which Keras is about to take from its variables."""
        groups = _context.internals().state_variables(self._model, self._parts)
        self.latest = tuple([v.value for v in group] for group in groups)
        self._held = None if self.layout.at_rest is None else self.latest

    def end(self, error: BaseException | None) -> None:
        """Called at the end of each call; nothing of its state is held on to."""
        latest, self.latest = self.latest, None
        if error is not None and latest is not None:
            self.give_back(latest, error)
        self._held = None

    def _wait_for_earlier_steps(self, outputs: Any) -> None:
        ahead = self._in_flight
        if ahead is None:
            return
        # One output each: the state is donated to the next step and gone.
        ahead.extend(jax.tree.leaves(outputs)[:1])
        if len(ahead) > _MOST_STEPS_AHEAD:
            jax.block_until_ready([ahead.popleft() for _ in range(_STEPS_PER_WAIT)])


class PredictFunction(StepFunction):
    """Outputs stay where XLA computed them; Keras fetches them to the host.

    Where other processes have a part of the mesh, every process gets all rows.
    """

    _parts = 2  # no metrics

    def _out_shardings(self) -> Any:
        outputs = replicated(self._mesh) if self._spans else None
        return (outputs, self._state_out())

    def _for_this_worker(self, outputs: Any, batch: StepBatch) -> Any:
        if batch.own is None:
            return outputs
        return jax.tree.map(lambda value: value[batch.own], outputs)


class TrainFunction(StepFunction):
    """The train step: the one that has two views."""

    _parts = 4  # the optimizer's, too

    def __init__(self, model: Any, strategy: Any, reduction: str):
        super().__init__(
            model,
            strategy,
            global_view.train_step(
                model,
                strategy.num_replicas_in_sync,
                reduction,
                layout_inside(model, strategy),
            ),
        )
        self._reduction = reduction
        self._replica: Any = None
        self._reasons: dict[Any, str | None] = {}
        # How many batches were trained in each view.
        self.views = collections.Counter[str]()

    def _trained(self) -> Any:
        return self._model

    def logs_so_far(self, state: Any) -> Any:
        """What an epoch logs in which all batches were trained on before."""
        pairs = zip(self._model.metrics_variables, state[3], strict=True)
        with keras.StatelessScope(state_mapping=list(pairs)):
            return self._model.get_metrics_result()

    @property
    def replica_jit(self) -> Any:
        """The compiled step of the replica view, made when first needed."""
        if self._replica is None:
            make = (
                replica_view.default_step
                if _context.internals().has_default_step(self._model)
                else replica_view.custom_step
            )
            self._replica = jax.jit(
                make(self._model, self.layout, self._reduction),
                donate_argnums=self._donated,
                in_shardings=self._in_shardings(),
                out_shardings=self._out_shardings(),
            )
        return self._replica

    def view(self, state: Any, batch: StepBatch) -> str:
        """The view that this batch trains in.

        Raises:
            ReplicaViewError: The replica view was asked for and is impossible.
        """
        wanted = self.strategy.view
        if wanted == "replica":
            return self._forced(batch)
        if not self._is_compiled or self._mesh.size == 1 or not batch.is_even:
            return "global"
        if wanted == "global":
            return "global"
        key = batch.signature()
        if key not in self._reasons:
            self._reasons[key] = self._why_global(state, batch)
            reason = self._reasons[key] or "each row's result is its own"
            view = "global" if self._reasons[key] else "replica"
            _log.info("%s trains in the %s view: %s", self._model.name, view, reason)
        return "global" if self._reasons[key] else "replica"

    def _forced(self, batch: StepBatch) -> str:
        if not self._is_compiled:
            raise errors.IncompatibleOptionsError(
                'view="replica"',
                f"jit_compile={self._model.jit_compile}, "
                f"run_eagerly={self._model.run_eagerly}",
                "The replica view is a compiled program.",
                'Compile the model with jit_compile=True, or use view="auto".',
            )
        is_custom = not _context.internals().has_default_step(self._model)
        if self.layout.is_split and is_custom:
            raise errors.ReplicaViewError(
                "its own train_step or compute_loss runs whole in each replica, and "
                f"shard={self.strategy.shard!r} leaves a replica a part of the state"
            )
        return "replica" if batch.is_even else "global"

    def _why_global(self, state: Any, batch: StepBatch) -> str | None:
        internals = _context.internals()
        if not internals.has_default_step(self._model):
            return "the model has a train_step or compute_loss of its own"
        wants = getattr(self.strategy, "synchronize_batch_norm", False)
        if wants and internals.has_batch_norm(self._model):
            return "BatchNormalization is synchronized"
        parts = state.lists() if isinstance(state, PlacedState) else state
        return why_rows_mix(self._model, parts, batch.data, self._mesh.size)

    def lower(self, values: Any, batch: StepBatch) -> tuple[Any, str]:
        """The program that trains such a batch, lowered from shapes; and its view."""
        view = self.view(values, batch)
        shardings = self.layout.of_state([len(group) for group in values])
        state = report.abstract(values, shardings)
        if view == "replica":
            return self.replica_jit.lower(state, batch.data), view
        return self.global_jit(batch).lower(state, batch.data, batch.rows), view

    def _program(self, state: PlacedState, batch: StepBatch) -> tuple[Any, ...]:
        view = self.view(state, batch)
        self.views[view] += 1
        if view == "replica":
            return self.replica_jit, state.lists(), batch.data
        return super()._program(state, batch)


def _give_back(model: Any, state: Any) -> None:
    """Hands a failed step's state back to the variables that gave it up.

    Keras empties the variables before the first step of an epoch; an error in that
    step would leave the model without weights.
    """
    groups = _context.internals().state_variables(model, len(state))
    is_there = state.is_there if isinstance(state, PlacedState) else lambda *_: True
    for k, variables in enumerate(groups):
        for place, variable in enumerate(variables):
            held = getattr(variable, "_value", None)
            is_lost = held is None or (
                isinstance(held, jax.Array) and held.is_deleted()
            )
            if is_lost and is_there(k, place):
                variable.assign(state[k][place])
    # Else Keras would put the state of the step before back, which is donated, at
    # the next look at the model.
    model._jax_state_synced = True
