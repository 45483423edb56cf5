"""Checkpoints that are written from where each part of a variable lies."""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator
from numbers import Integral
from typing import Any

import keras
import numpy as np

from keras_mirror import _context, _engine, errors
from keras_mirror.callbacks.consistency import check_count


def _orbax() -> Any:
    try:
        import orbax.checkpoint as orbax
    except ImportError as error:
        raise errors.MissingPackageError(
            "ShardedCheckpoint", "orbax-checkpoint"
        ) from error
    return orbax


def _strategy_of(model: Any) -> Any:
    binding = _context.binding_of(model)
    found = binding.distribution if binding is not None else None
    return found if hasattr(found, "num_replicas_in_sync") else None


_WHEN = "commit_timestamp_nsecs"


def _checked(directory: object) -> str:
    if not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory):
        raise errors.OptionKindError("directory", directory, "the path of a folder")
    found = os.path.abspath(str(os.fspath(directory)))
    if os.path.exists(found) and not os.path.isdir(found):
        raise errors.OptionKindError("directory", directory, "a folder, and not a file")
    return found


def _get_ready(model: Any) -> None:
    if getattr(model, "optimizer", None) is None:
        raise errors.ModelNotReadyError("ShardedCheckpoint", model, "compiled")
    if not model.built:
        raise errors.ModelNotReadyError("ShardedCheckpoint", model, "built")
    if not model.optimizer.built:  # so that it has slots
        model.optimizer.build(model.trainable_variables)


def _about(model: Any) -> dict[str, str]:
    """What shapes do not tell of a model."""
    names, optimizer = [], model.optimizer
    while optimizer is not None:
        if not hasattr(optimizer, "inner"):  # a DistributedOptimizer has no slots
            names.append(type(optimizer).__name__)
        inner = getattr(optimizer, "inner", None)
        optimizer = inner or getattr(optimizer, "inner_optimizer", None)
    return {"optimizer": " of ".join(names)}


@contextlib.contextmanager
def _readable(directory: str, step: int, steps: list[int]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        said = str(error).partition("\n")[0][:200]
        raise errors.CheckpointError(
            directory, f"damaged files of step {step} ({said})", steps
        ) from error


def _kind(array: Any) -> str:
    return f"{np.dtype(array.dtype)}{list(array.shape)}"


class ShardedCheckpoint(keras.callbacks.Callback):
    """Saves a model's weights and slots during `fit`, each part from where it lies.

    For models whose variables are split: none is put together on a device. Training
    goes on while files are written. A checkpoint is there whole or not at all: a job
    that is killed leaves the one before. It is read on any number of devices, with any
    `shard` and under any strategy. Many workers must all have the callback, with a
    directory that all of them see.

    Args:
        directory: Folder of the checkpoints, one folder a step.
        every_steps: Saves after so many steps; None: after every epoch.
        max_to_keep: How many checkpoints to keep; older ones are deleted.
        is_asynchronous: Whether training goes on while files are written.

    Raises:
        MissingPackageError: Orbax is not installed (the extra `checkpoint`).
        OptionKindError: A number that is not whole, or below 1; a folder that is none.

    Example:

    ```python
    saving = km.ShardedCheckpoint("checkpoints")
    model.fit(x, y, epochs=10, callbacks=[saving])
    ...
    km.ShardedCheckpoint("checkpoints").restore(model)  # in another program
    ```
    """

    def __init__(
        self,
        directory: "str | os.PathLike[str]",
        *,
        every_steps: int | None = None,
        max_to_keep: int = 3,
        is_asynchronous: bool = True,
    ):
        super().__init__()
        if every_steps is not None:
            check_count("every_steps", every_steps)
        check_count("max_to_keep", max_to_keep)
        orbax = _orbax()
        if not isinstance(is_asynchronous, bool):
            raise errors.OptionKindError(
                "is_asynchronous", is_asynchronous, "True or False"
            )
        self.directory = _checked(directory)
        self.every_steps = every_steps
        self._manager_options = {
            "max_to_keep": max_to_keep,
            "enable_async_checkpointing": is_asynchronous,
            # In threads of its own Orbax waits for ever for one that failed.
            "async_options": orbax.AsyncOptions(
                create_directories_asynchronously=False
            ),
        }
        self._manager: Any = None
        self._steps = 0

    def _opened(self) -> Any:
        if self._manager is None:
            orbax = _orbax()
            options = orbax.CheckpointManagerOptions(**self._manager_options)
            self._manager = orbax.CheckpointManager(
                self.directory,
                item_handlers=orbax.StandardCheckpointHandler(),
                options=options,
            )
        return self._manager

    def _noted(self, step: int, what: str) -> Any:
        """What Orbax has noted beside a checkpoint's arrays; None where it has not.

        Its own reading of it goes through the arrays of every checkpoint.
        """
        path = pathlib.Path(self.directory, str(step), "_CHECKPOINT_METADATA")
        with contextlib.suppress(OSError, ValueError):
            return json.loads(path.read_text()).get(what)
        return None

    def close(self) -> None:
        """Waits until everything is written."""
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.wait_until_finished()
            manager.close()

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras calls it at the beginning of `fit`."""
        self._steps = 0
        self._opened()  # what is wrong with the folder is known before an epoch is lost
        _context.when_call_ends(self.close)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keras calls it after each step."""
        self._steps += 1
        if self.every_steps is not None and self._steps % self.every_steps == 0:
            self._save(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keras calls it after each epoch."""
        if self.every_steps is None:
            self._save(self.model)

    def on_train_end(self, logs: Any = None) -> None:
        """Keras calls it at the end of `fit`."""
        self.close()

    def save(self, model: Any) -> None:
        """Saves a model under the number of the step that its optimizer has come to.

        A checkpoint of the same number that is there already is deleted before. The
        files are there when this returns.

        Args:
            model: A built and compiled model.

        Raises:
            ModelNotReadyError: It is not built or not compiled.
        """
        self._save(model)
        self._opened().wait_until_finished()

    def _save(self, model: Any) -> None:
        _get_ready(model)
        arrays = _engine.load().checkpoint_arrays(model, _strategy_of(model))
        step = int(model.optimizer.iterations)
        manager, saved = self._opened(), _orbax().args.StandardSave(arrays)
        if step in manager.all_steps():
            manager.wait_until_finished()
            manager.delete(step)
        manager.save(step, args=saved, force=True, custom_metadata=_about(model))

    def restore(self, model: Any, step: int | None = None) -> int:
        """Gives a model the weights and slots of a checkpoint.

        Args:
            model: A built and compiled model like the one that was saved.
            step: Which checkpoint; None: the one that was saved last.

        Returns:
            The step that it was saved at.

        Raises:
            CheckpointError: There is no such checkpoint, it is of another model or
                optimizer, or its files are damaged. The model is as it was.
            ModelNotReadyError: The model is not built or not compiled.
            OptionKindError: `step` is no number.
        """
        _get_ready(model)
        if step is not None and (
            isinstance(step, bool) or not isinstance(step, Integral)
        ):
            raise errors.OptionKindError("step", step, "a whole number, or None")
        if not os.path.isdir(self.directory):
            raise errors.CheckpointError(self.directory, "no such folder", ())
        manager, engine = self._opened(), _engine.load()
        manager.wait_until_finished()
        manager.reload()
        steps = manager.all_steps()
        if not steps:
            raise errors.CheckpointError(self.directory, "no checkpoint", ())
        if step is None:
            step = max(steps, key=lambda n: (self._noted(n, _WHEN) or 0, n))
        if step not in steps:
            raise errors.CheckpointError(
                self.directory, f"no checkpoint of step {step}", steps
            )
        about = self._noted(step, "custom_metadata") or _about(model)
        if about != _about(model):
            raise errors.CheckpointError(
                self.directory,
                f"{about} at step {step} where the model has {_about(model)}",
                steps,
            )
        strategy = _strategy_of(model)
        if strategy is not None:
            engine.place_model(model, strategy)
        templates = engine.checkpoint_templates(model, strategy)
        with _readable(self.directory, step, steps):
            saved = dict(manager.item_metadata(step).items())
        wanted = {name: _kind(t) for name, t in templates.items()}
        there = {name: _kind(found) for name, found in saved.items()}
        if there != wanted:
            names = sorted(there.keys() | wanted.keys())
            name = next(n for n in names if there.get(n) != wanted.get(n))
            raise errors.CheckpointError(
                self.directory,
                f"variable {name}: {there.get(name)} where the model has "
                f"{wanted.get(name)}",
                steps,
            )
        orbax = _orbax()
        with _readable(self.directory, step, steps):
            values = manager.restore(step, args=orbax.args.StandardRestore(templates))
        engine.take_checkpoint(model, strategy, values)
        return step
