"""BackupAndRestore across workers: an epoch that was broken off is taken up again.

Keras backs up the weights and the number of the epoch, and begins that epoch anew. Many
workers also keep how many batches of it were trained on, the state of the generators
that order its rows, and what no weights file holds: seeds, and the metrics so far. All
of it is in the file of the weights, which is there whole or not at all.
"""

import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterable
from typing import Any

import h5py
import keras
import numpy as np

from keras_mirror import _context, _engine, _seeds
from keras_mirror.callbacks.chief import is_silent_worker

_KEY = "keras_mirror"


@dataclasses.dataclass
class _Epoch:
    """The epoch that is under way.

    Attributes:
        number: Its number.
        generators: The state of the host's generators when it began.
        batches: How many of its batches were trained on.
    """

    number: int
    generators: dict[str, Any]
    batches: int


def _seeds_of(model: Any) -> list[Any]:
    return [v for v in model.non_trainable_variables if _seeds.is_seed(v)]


def _values(variables: Iterable[Any]) -> list[Any]:
    return [np.asarray(variable.value).tolist() for variable in variables]


def _assign(variables: list[Any], values: list[Any]) -> None:
    """Nothing where the model was changed since."""
    arrays = [np.asarray(value) for value in values]
    if [v.shape for v in variables] == [a.shape for a in arrays]:
        for variable, value in zip(variables, arrays, strict=True):
            variable.assign(value.astype(variable.dtype))


def _is_local(callback: Any) -> bool:
    return "://" not in str(callback._weights_path)


def _read(callback: Any) -> Any:
    if not os.path.exists(callback._weights_path):
        return None
    with h5py.File(callback._weights_path) as file:
        record: Any = file.get(_KEY)
        return None if record is None else json.loads(record[()])


def saving(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `_save_model`: the chief writes, and more than Keras does."""

    @functools.wraps(original)
    def _save_model(self: Any) -> None:
        if is_silent_worker(self.model):
            return
        epoch: _Epoch | None = getattr(self, "_km_epoch", None)
        if epoch is None or not _is_local(self):
            original(self)
            return
        path = self._weights_path
        self._weights_path = os.path.join(self.backup_dir, "new.weights.h5")
        try:
            original(self)
            with h5py.File(self._weights_path, "r+") as file:
                file[_KEY] = json.dumps(_record(self, epoch))
            if self.double_checkpoint and os.path.exists(path):
                shutil.copyfile(path, self._prev_weights_path)
            os.replace(self._weights_path, path)
        finally:
            self._weights_path = path

    return _save_model


def _record(callback: Any, epoch: _Epoch) -> dict[str, Any]:
    model = callback.model
    model.jax_state_sync()
    has_ended = callback._current_epoch > epoch.number
    return {
        "epoch": callback._current_epoch,
        "batches": 0 if has_ended else epoch.batches,
        "generators": _seeds.host_state() if has_ended else epoch.generators,
        "seeds": _values(_seeds_of(model)),
        "metrics": _values(model.metrics_variables),
    }


def restoring(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `on_train_begin`: all begin with what the chief has read."""

    @functools.wraps(original)
    def on_train_begin(self: Any, logs: Any = None) -> None:
        original(self, logs)
        self._km_epoch = self._km_record = None
        if _context.strategy_of_many(self.model) is None:
            return
        read = _read(self) if _is_local(self) else None
        epoch = self.model._initial_epoch if read is None else read["epoch"]
        told = _engine.load().exchange([epoch, read], "the backup to begin with")
        self.model._initial_epoch, self._km_record = told[0]
        _engine.load().take_from_chief(self.model)

    return on_train_begin


def beginning_epoch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `on_epoch_begin`: the first one goes on where the backup was made."""

    @functools.wraps(original)
    def on_epoch_begin(self: Any, epoch: int, logs: Any = None) -> None:
        original(self, epoch, logs)
        if _context.strategy_of_many(self.model) is None:
            return
        record, self._km_record = getattr(self, "_km_record", None), None
        batches = 0
        if record is not None:
            batches = record["batches"]
            _seeds.set_host_state(record["generators"])
            _assign(_seeds_of(self.model), record["seeds"])
            if batches:
                _assign(self.model.metrics_variables, record["metrics"])
            _context.skip_batches(self.model, batches)
        self._current_epoch = epoch
        self._km_epoch = _Epoch(epoch, _seeds.host_state(), batches)

    return on_epoch_begin


def counting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `on_train_batch_end`."""

    @functools.wraps(original)
    def on_train_batch_end(self: Any, batch: int, logs: Any = None) -> None:
        if getattr(self, "_km_epoch", None) is not None:
            self._km_epoch.batches = batch + 1
        original(self, batch, logs)

    return on_train_batch_end


def save_before_leaving(callbacks: Any) -> None:
    """Backs up a fit that all workers leave in the middle of an epoch.

    Args:
        callbacks: What `fit` was given.
    """
    callbacks = getattr(callbacks, "callbacks", callbacks)
    if not isinstance(callbacks, (list, tuple)):
        callbacks = [callbacks]
    for callback in callbacks:
        is_backup = isinstance(callback, keras.callbacks.BackupAndRestore)
        if is_backup and getattr(callback, "_km_epoch", None) is not None:
            callback._save_model()
    # The launcher stops those that are left once the first has gone.
    _engine.load().exchange(None, "the backup before all leave")
