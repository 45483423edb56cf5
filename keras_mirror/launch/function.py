"""Launching a function, from a script or a notebook."""

import os
import pathlib
import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_mirror.errors import LaunchFailedError, LaunchUsageError
from keras_mirror.launch.agent import launch as run_job
from keras_mirror.launch.config import LaunchConfig


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    workers: int = 2,
    devices_per_worker: int | None = None,
    max_restarts: int = 0,
    log_dir: str | os.PathLike[str] | None = None,
) -> list[Any]:
    """Calls a function in several worker processes that train together.

    Each worker finds the others in `MultiWorkerMirroredStrategy()`. The function may
    be defined in a notebook or in the script itself: it is sent by value, with what
    it refers to, through a file of this user alone.

    Args:
        fn: What each worker calls. It imports and makes what it trains.
        args: Positional arguments; anything that cloudpickle can write.
        kwargs: Keyword arguments, likewise.
        workers: How many processes.
        devices_per_worker: Virtual CPU devices of each; None leaves it to JAX.
        max_restarts: How often a failed job is started again.
        log_dir: Where each worker's output is kept, as rank<k>.log.

    Returns:
        What the function returned on each worker, by rank.

    Raises:
        LaunchUsageError: `fn` cannot be called, or an option is wrong.
        LaunchFailedError: A worker failed; the first that did is named.

    Example:

    ```python
    def train():
        import keras_mirror as km

        km.set_strategy("multi_worker_mirrored")  # before JAX makes its first array
        model = build()
        model.compile("adam", "mse")
        return model.fit(x, y).history

    history = km.launch(train, workers=2, devices_per_worker=2)[0]
    ```
    """
    try:
        import cloudpickle
    except ImportError as error:
        raise ImportError(
            "keras_mirror.launch sends functions with cloudpickle, which is not "
            "installed. Install keras_mirror[launch]."
        ) from error
    if not callable(fn):
        raise LaunchUsageError(f"`fn` must be callable. Received: {fn!r}.")
    if not isinstance(args, (list, tuple)):
        raise LaunchUsageError(f"`args` must be a list or tuple. Received: {args!r}.")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise LaunchUsageError(f"`kwargs` must be a mapping. Received: {kwargs!r}.")
    with tempfile.TemporaryDirectory(prefix="keras_mirror_") as folder:
        path = pathlib.Path(folder)
        what = {"fn": fn, "args": tuple(args), "kwargs": dict(kwargs or {})}
        try:
            with open(path / "call.pickle", "wb") as file:
                cloudpickle.dump(tuple(what.values()), file)
        except Exception as error:
            _name_what_cannot_be_sent(what, cloudpickle.dumps)
            raise LaunchUsageError(f"Nothing can be sent: {error}.") from error
        run_job(
            LaunchConfig(
                ["-m", "keras_mirror.launch.call", folder],
                workers=workers,
                devices_per_worker=devices_per_worker,
                max_restarts=max_restarts,
                log_dir=log_dir,
                environment=_environment(),
            )
        )
        found = []
        for rank in range(workers):
            result = path / f"result{rank}.pickle"
            if not result.exists():
                raise LaunchFailedError(
                    "Each worker must return from the function. Received: worker "
                    f"{rank} ended the process inside of it, with exit code 0.",
                    1,
                )
            try:
                found.append(pickle.loads(result.read_bytes()))
            except Exception as error:
                raise LaunchFailedError(
                    "Each worker must return what this process can read with pickle. "
                    f"Received from worker {rank}: {type(error).__name__}: {error}.",
                    1,
                ) from error
        return found


def _name_what_cannot_be_sent(
    what: Mapping[str, Any], dumps: Callable[[Any], Any]
) -> None:
    for name, value in what.items():
        try:
            dumps(value)
        except Exception as error:
            raise LaunchUsageError(
                f"`{name}` is sent to the workers with cloudpickle. Received: "
                f"{value!r} ({type(error).__name__}: {error})."
            ) from error


def _environment() -> dict[str, str]:
    """This process' own, and where it finds its modules."""
    import sys

    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path}
