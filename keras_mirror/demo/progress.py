"""Progress on stderr: a bar on a terminal, a line an epoch elsewhere."""

from typing import Any

import keras
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class TrainingProgress:
    """Shows the progress of several trainings, one below the other.

    A context manager around all of them.

    Args:
        console: A rich console on stderr.
        epochs: Epochs of each training.
    """

    def __init__(self, console: Console, epochs: int):
        self._console = console
        self._epochs = epochs
        self._bars = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> "TrainingProgress":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def callback(self, label: str) -> keras.callbacks.Callback:
        """A callback for `fit` that shows one training under `label`."""
        return _ProgressCallback(self, label)

    def add(self, label: str, steps: int) -> Any:
        """Adds a training of `steps` steps an epoch; returns its handle."""
        state = f"epoch 1/{self._epochs}"
        return self._bars.add_task(label, total=steps * self._epochs, state=state)

    def advance(self, task: Any, completed: int) -> None:
        """Moves the bar of `task` to `completed` steps."""
        self._bars.update(task, completed=completed)

    def end_epoch(
        self, task: Any, label: str, epoch: int, steps: int, logs: dict[str, float]
    ) -> None:
        """Shows the results of the epoch with index `epoch`."""
        results = "  ".join(f"{name} {value:.4f}" for name, value in logs.items())
        state = f"epoch {epoch + 1}/{self._epochs}  {results}"
        self._bars.update(task, completed=(epoch + 1) * steps, state=state)
        if not self._console.is_terminal:
            self._console.print(f"{label}: {state}", soft_wrap=True, highlight=False)


class _ProgressCallback(keras.callbacks.Callback):
    def __init__(self, progress: TrainingProgress, label: str):
        super().__init__()
        self._progress = progress
        self._label = label
        self._epoch = 0

    @property
    def _steps(self) -> int:
        return (self.params or {}).get("steps") or 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._task = self._progress.add(self._label, self._steps)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        # The end of a batch would bring its logs, and with them a wait for the
        # step in every step: the very time that the demo measures.
        self._progress.advance(self._task, self._epoch * self._steps + batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        shown = {key: logs[key] for key in ("loss", "accuracy") if key in (logs or {})}
        self._progress.end_epoch(self._task, self._label, epoch, self._steps, shown)
