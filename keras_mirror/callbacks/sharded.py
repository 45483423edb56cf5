"""Checkpoints that are written from where each part of a variable lies."""

import os
from typing import Any

import keras

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
        OptionValueError: A number that is not whole, or below 1.

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
        self.directory = os.path.abspath(os.fspath(directory))
        self.every_steps = every_steps
        self._manager_options = {
            "max_to_keep": max_to_keep,
            "enable_async_checkpointing": is_asynchronous,
        }
        self._manager: Any = None
        self._steps = 0
        _orbax()

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

    def close(self) -> None:
        """Waits until everything is written."""
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.wait_until_finished()
            manager.close()

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras calls it."""
        self._steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keras calls it after each step."""
        self._steps += 1
        if self.every_steps is not None and self._steps % self.every_steps == 0:
            self.save(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keras calls it after each epoch."""
        if self.every_steps is None:
            self.save(self.model)

    def on_train_end(self, logs: Any = None) -> None:
        """Keras calls it at the end of `fit`."""
        self.close()

    def save(self, model: Any) -> None:
        """Saves a model under the number of the step that its optimizer has come to.

        A checkpoint of the same number that is there already is deleted before.

        Args:
            model: A compiled model.
        """
        arrays = _engine.load().checkpoint_arrays(model, _strategy_of(model))
        step = int(model.optimizer.iterations)
        manager, saved = self._opened(), _orbax().args.StandardSave(arrays)
        if step in manager.all_steps():
            manager.wait_until_finished()
            manager.delete(step)
        manager.save(step, args=saved, force=True)

    def restore(self, model: Any, step: int | None = None) -> int:
        """Gives a model the weights and slots of a checkpoint.

        Args:
            model: A built and compiled model like the one that was saved.
            step: Which checkpoint; None: the newest.

        Returns:
            The step that it was saved at.

        Raises:
            CheckpointError: There is no such checkpoint, or it is of another model.
        """
        manager, engine = self._opened(), _engine.load()
        manager.reload()
        step = manager.latest_step() if step is None else step
        if step is None or step not in manager.all_steps():
            raise errors.CheckpointError(
                self.directory, f"no checkpoint of step {step}", manager.all_steps()
            )
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        strategy = _strategy_of(model)
        if strategy is not None:
            engine.place_model(model, strategy)
        templates = engine.checkpoint_templates(model, strategy)
        saved = dict(manager.item_metadata(step).items())
        wanted = {name: tuple(t.shape) for name, t in templates.items()}
        there = {name: tuple(found.shape) for name, found in saved.items()}
        if there != wanted:
            names = sorted(there.keys() | wanted.keys())
            name = next(n for n in names if there.get(n) != wanted.get(n))
            raise errors.CheckpointError(
                self.directory,
                f"variable {name} of shape {there.get(name)} where the model has "
                f"{wanted.get(name)}",
                manager.all_steps(),
            )
        orbax = _orbax()
        values = manager.restore(step, args=orbax.args.StandardRestore(templates))
        engine.take_checkpoint(model, strategy, values)
        return step
