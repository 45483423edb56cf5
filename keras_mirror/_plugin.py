"""The one file that touches `keras.src`: every name wrapped, and why.

`install` wraps the names of `_wrapped_names`; `uninstall` puts the originals back. What
the backends need of Keras' internals is handed to them as `_Internals`.
"""

import contextlib
import dataclasses
import functools
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_mirror import _context, _engine, callbacks, errors, worker_data
from keras_mirror._binding import compile_under_strategy, move_model
from keras_mirror._calls import (
    call_under_strategy,
    holding_what_is_purged,
    make_function,
    noting_what_is_handed_out,
)
from keras_mirror.optimizer import DistributedOptimizer
from keras_mirror.strategies import Strategy

# Keras versions whose own tests and ours were run with this file.
TESTED_KERAS = ("3.12.0", "3.15.1")

_originals: list[tuple[Any, str, Any]] = []


def _eager_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """`model(x)` outside of a step: variables and inputs must share devices."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        from keras.src import backend

        binding = _context.binding_of(self)
        strategy = binding.distribution if binding is not None else None
        inside = backend.in_stateless_scope() or _context.is_in_eager_call()
        if inside or not isinstance(strategy, Strategy):
            return original(self, *args, **kwargs)
        engine = _engine.load()
        engine.place_model(self, strategy)
        args, kwargs = engine.place_inputs((args, kwargs), strategy)
        with _context.eager_call(self), engine.call_context(strategy):
            return original(self, *args, **kwargs)

    return call


def _get_iterator(original: Callable[..., Any]) -> Callable[..., Any]:
    from keras.src.trainers.data_adapters import ArrayDataAdapter

    @functools.wraps(original)
    def get_iterator(self: Any) -> Any:
        strategy = _context.running_strategy()
        if strategy is None:
            return original(self)
        adapter = self.data_adapter
        reused = not isinstance(adapter, ArrayDataAdapter)
        batches, part = adapter.get_jax_iterator(), getattr(adapter, "_km_part", None)
        if part is not None and part.may_run_out:
            batches = worker_data.naming_missing_files(batches)
        return _engine.load().batches(
            batches, strategy, may_be_reused=reused, part=part
        )

    return get_iterator


def _going_on(original: Callable[..., Any]) -> Callable[..., Any]:
    """An epoch from the batch on at which a backup of it was made."""

    @functools.wraps(original)
    def enumerate_iterator(self: Any) -> Iterator[Any]:
        model = _context.fitted_model()
        skipped = _context.batches_to_skip(model) if model is not None else 0
        if model is None or not skipped:
            yield from original(self)
            return
        model.train_function.step.is_resumed = True
        left_out = None
        for begin, end, iterator in original(self):
            if end < skipped:
                for _ in range(begin, end + 1):
                    next(iterator, None)
                left_out = begin, end
            else:
                left_out = None
                yield begin, end, iterator
        if left_out is not None:
            # Keras cannot end an epoch without a step.
            yield *left_out, iter(())

    return enumerate_iterator


def _catch_stop(original: Callable[..., Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    @functools.wraps(original)
    def catch_stop_iteration(self: Any) -> Iterator[None]:
        with contextlib.suppress(_engine.TrainingStopped), original(self):
            yield

    return catch_stop_iteration


def _share_order(adapter: Any) -> None:
    """Lets workers begin each epoch with the chief's random state.

    What draws random numbers for each row, as augmentation does, draws unequally many
    on workers that have unequally many rows; the next shuffle would differ.
    """
    begin = adapter.on_epoch_begin

    def on_epoch_begin() -> None:
        _engine.load().share_random_state()
        begin()

    adapter.on_epoch_begin = on_epoch_begin


def _data_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_data_adapter(*args: Any, **kwargs: Any) -> Any:
        strategy = _context.running_strategy()
        if strategy is None:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        part = None
        if _context.has_many_workers(strategy):
            data, part = worker_data.own_part(bound.arguments["x"], strategy)
            bound.arguments["x"] = data
        # Else Keras hands a tf.data dataset to `distribute_dataset`, which is for
        # loops of one's own.
        with _context.keras_distribution(None):
            adapter = original(*bound.args, **bound.kwargs)
        worker_data.stop_in_one_place(adapter)
        if part is not None and part.shares_order:
            _share_order(adapter)
        if part is not None and part.may_run_out:
            # Of the adapter, which may have added class weights.
            example = worker_data.like_a_batch(adapter.get_tf_dataset())
            part = dataclasses.replace(part, example=example)
        adapter._km_part = part
        return adapter

    return get_data_adapter


def _distribute_data(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def distribute_data(data: Any, layouts: Any = None) -> Any:
        if _context.running_strategy() is None:
            return original(data, layouts)
        from keras.src import tree

        # Left on the host: the step puts each device's rows on that device.
        return tree.map_structure(
            lambda x: x if x is None or hasattr(x, "dtype") else _as_numpy(x), data
        )

    return distribute_data


def _as_numpy(value: Any) -> Any:
    import numpy as np

    return np.asarray(value)


def _keras_scope(original: Callable[..., Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    @functools.wraps(original)
    def scope(self: Any) -> Iterator[None]:
        with _context.scope(self), original(self):
            yield

    return scope


def _hooked(name: str) -> Callable[[Any], Any]:
    """Sends a reduction over the batch through the hooks of a traced step."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def reduction(*args: Any, **kwargs: Any) -> Any:
            hooks = _context.current_hooks()
            if hooks is None:
                return original(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return getattr(hooks, name)(original, *bound.args)

        return reduction

    return wrap


def _moments(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def moments(self: Any, inputs: Any, mask: Any) -> Any:
        hooks = _context.current_hooks()
        if hooks is None:
            return original(self, inputs, mask)
        return hooks.moments(functools.partial(original, self), inputs, mask)

    return moments


def _lookup(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, inputs: Any) -> Any:
        hooks = _context.current_hooks()
        if hooks is None:
            return original(self, inputs)
        return hooks.lookup(original, self, inputs)

    return call


def _wrapped_names() -> list[tuple[Any, str, Callable[[Any], Any], str]]:
    """Every name that is wrapped: where, what, by what, why."""
    from keras.src.callbacks.callback_list import CallbackList
    from keras.src.distribution.distribution_lib import Distribution
    from keras.src.layers import BatchNormalization, Embedding
    from keras.src.losses import loss
    from keras.src.trainers import data_adapters
    from keras.src.trainers.data_adapters import py_dataset_adapter
    from keras.src.trainers.trainer import Trainer

    enqueuer = py_dataset_adapter.PyDatasetEnqueuer
    names: list[tuple[Any, str, Callable[[Any], Any], str]] = [
        (Trainer, "compile", compile_under_strategy, "the argument `distribution`"),
        (loss, "apply_mask", _hooked("apply_mask"), "masks' denominators"),
        (loss, "reduce_values", _hooked("reduce_values"), "losses' denominators"),
        (BatchNormalization, "_moments", _moments, "its batch statistics"),
        (Embedding, "call", _lookup, "rows of a table that is split"),
        (Distribution, "scope", _keras_scope, "counts as the innermost scope"),
        (data_adapters, "get_data_adapter", _data_adapter, "a worker reads its part"),
        (enqueuer, "stop", worker_data.stopping_in_one_place, "see `read_ahead`"),
    ]
    for name, wrap in (
        ("on_train_begin", callbacks.agreeing_from_start),
        ("on_epoch_begin", callbacks.agreeing_at_epoch_begin),
        ("on_epoch_end", callbacks.agreeing_at_epoch_end),
    ):
        names.append((CallbackList, name, wrap, "workers agree on rate and stop"))
    for owner, name in (
        (keras.Model, "save"),
        (keras.Model, "save_weights"),
        (keras.Model, "export"),
        (keras.callbacks.BackupAndRestore, "on_train_end"),
    ):
        names.append((owner, name, callbacks.chief_only, "the chief writes files"))
    for name, wrap in (
        ("_save_model", callbacks.saving),
        ("on_train_begin", callbacks.restoring),
        ("on_epoch_begin", callbacks.beginning_epoch),
        ("on_train_batch_end", callbacks.counting),
    ):
        owner = keras.callbacks.BackupAndRestore
        names.append((owner, name, wrap, "goes on within an epoch"))
    orbax = sys.modules.get("keras.src.callbacks.orbax_checkpoint")  # Keras >= 3.13
    if orbax is not None:
        wrap = callbacks.as_numpy_for_many_workers
        names.append((orbax, "_get_state_tree", wrap, "Orbax takes no local arrays"))
    saving = sys.modules.get("keras.src.saving.saving_api")
    if hasattr(saving, "build_orbax_abstract_pytree"):
        wrap = callbacks.loading_as_numpy
        names.append((saving, "build_orbax_abstract_pytree", wrap, "nor loads them"))
    for kind in ("train", "test", "predict"):
        for side in ("begin", "end"):
            name = f"on_{kind}_batch_{side}"
            wrap = callbacks.heard_or_spared(name)
            names.append((CallbackList, name, wrap, "calls that nobody listens to"))
    make_names = {"jax": _jax_names, "tensorflow": _tensorflow_names}
    found = make_names.get(keras.config.backend())
    return names if found is None else names + found()


def _jax_names() -> list[tuple[Any, str, Callable[[Any], Any], str]]:
    from keras.src.backend.jax import trainer

    names: list[tuple[Any, str, Callable[[Any], Any], str]] = [
        (keras.Model, "__call__", _eager_call, "`model(x)` on arrays elsewhere"),
        (trainer.JAXEpochIterator, "_get_iterator", _get_iterator, "placing batches"),
        (trainer.JAXEpochIterator, "_enumerate_iterator", _going_on, "see `backup`"),
        (
            trainer.JAXEpochIterator,
            "catch_stop_iteration",
            _catch_stop,
            "workers stop before the same step",
        ),
        (trainer, "_distribute_data", _distribute_data, "no batch whole on a device"),
    ]
    cls = trainer.JAXTrainer
    name, why = "jax_state_sync", "what a callback sets is seen"
    names.append((cls, name, noting_what_is_handed_out, why))
    name, why = "_purge_model_variables", "Ctrl-C leaves the model its variables"
    names.append((cls, name, holding_what_is_purged, why))
    return names + _calls_of(cls)


def _tensorflow_names() -> list[tuple[Any, str, Callable[[Any], Any], str]]:
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

    return _calls_of(TensorFlowTrainer)


def _calls_of(cls: Any) -> list[tuple[Any, str, Callable[[Any], Any], str]]:
    """What every backend's trainer has."""
    names: list[tuple[Any, str, Callable[[Any], Any], str]] = []
    for kind in ("train", "test", "predict"):
        name = f"make_{kind}_function"
        names.append((cls, name, make_function(kind), "the step that runs"))
    for name in (
        "fit",
        "evaluate",
        "predict",
        "train_on_batch",
        "test_on_batch",
        "predict_on_batch",
    ):
        names.append((cls, name, call_under_strategy, "which strategy governs"))
    return names


class _Internals:
    """See `_context.KerasInternals`."""

    _STEP = (
        "train_step",
        "compute_loss_and_updates",
        "stateless_compute_loss",
        "compute_loss",
        "_compute_loss",
    )

    def has_default_step(self, model: Any) -> bool:
        from keras.src.models.model import Trainer

        return all(
            getattr(getattr(model, name), "__func__", None) is getattr(Trainer, name)
            for name in self._STEP
            if hasattr(Trainer, name)
        )

    def is_built(self, model: Any, kind: str) -> bool:
        layers = all(layer.built for layer in model._flatten_layers())
        if kind == "predict":
            return layers
        needed = [model._compile_loss, model._compile_metrics]
        if kind == "train":
            needed.append(model.optimizer)
        return layers and all(each is None or each.built for each in needed)

    def build(self, model: Any, data: Any) -> None:
        model._symbolic_build(data_batch=data)

    def has_batch_norm(self, model: Any) -> bool:
        from keras.src.layers import BatchNormalization

        layers = model._flatten_layers()
        return any(isinstance(layer, BatchNormalization) for layer in layers)

    def batch_norm_variables(self, model: Any) -> set[int]:
        from keras.src.layers import BatchNormalization

        layers = model._flatten_layers()
        found = [layer for layer in layers if isinstance(layer, BatchNormalization)]
        return {id(v) for layer in found for v in layer.non_trainable_variables}

    def state_variables(self, model: Any, parts: int) -> list[list[Any]]:
        groups = [model.trainable_variables, model.non_trainable_variables]
        if parts == 4:
            groups.append(model.optimizer.variables)
        if parts >= 3:
            groups.append(model.metrics_variables)
        return groups

    @contextlib.contextmanager
    def reducing_optimizers(
        self, model: Any, reduce: Callable[[Any, Any], Any]
    ) -> Iterator[None]:
        attributes = vars(model)
        found = {
            name: value
            for name, value in attributes.items()
            if isinstance(value, keras.optimizers.Optimizer)
        }
        try:
            for name, value in found.items():
                inner = getattr(value, "inner", value)
                attributes[name] = DistributedOptimizer(inner, _reduce=reduce)
            yield
        finally:
            attributes.update(found)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _warn_untested() -> None:
    lowest, highest = map(_numbers, TESTED_KERAS)
    if not lowest[:2] <= _numbers(keras.__version__)[:2] <= highest[:2]:
        warnings.warn(
            errors.UntestedKerasWarning(keras.__version__, *TESTED_KERAS),
            stacklevel=3,
        )


def install() -> None:
    """Wraps Keras' names; does nothing where they are wrapped already."""
    if _originals:
        return
    _warn_untested()
    _context.provide_internals(_Internals())
    for owner, name, wrap, _ in _wrapped_names():
        original = inspect.getattr_static(owner, name)
        is_own = not inspect.isclass(owner) or name in vars(owner)
        _originals.append((owner, name, original if is_own else None))
        setattr(owner, name, wrap(original))


def uninstall() -> None:
    """Puts Keras' own names back; bound models train as plain Keras does."""
    for model, binding in _context.bindings():
        if isinstance(binding.distribution, Strategy):
            for name in ("train_function", "test_function", "predict_function"):
                setattr(model, name, None)
            move_model(model, None)
    while _originals:
        owner, name, original = _originals.pop()
        if original is None:  # it was inherited
            delattr(owner, name)
        else:
            setattr(owner, name, original)
    _context.provide_internals(None)
