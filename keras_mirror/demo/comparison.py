"""One device beside replicas: the same training twice, and what differs."""

import difflib
import math
import sys
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from rich.console import Console

from keras_mirror import _plugin
from keras_mirror._engine import load
from keras_mirror.demo.datasets import ImageData, load_data
from keras_mirror.demo.devices import choose_devices
from keras_mirror.demo.mesh_picture import held_by_devices
from keras_mirror.demo.progress import TrainingProgress
from keras_mirror.demo.settings import DemoError, DemoSettings, UsageError
from keras_mirror.demo.training import TrainingRun, build_model, train
from keras_mirror.display import mesh_text, to_ascii
from keras_mirror.errors import UnknownStrategyError
from keras_mirror.strategies import Strategy, get_strategy_class


@dataclass(frozen=True)
class Comparison:
    """What the demo found.

    Attributes:
        settings: What it was asked to do.
        devices: The devices of the replicas.
        strategy: Name of the strategy of the replicas.
        num_replicas: How many replicas trained.
        one_device: Results on one device.
        replicas: Results on the replicas.
        max_weight_difference: Largest absolute difference of a weight between the
            two after training.
        collectives_per_step: Collective operations in the replicas' train step.
        bytes_per_step: Bytes that each device sends per step.
    """

    settings: DemoSettings
    devices: tuple[str, ...]
    strategy: str
    num_replicas: int
    one_device: TrainingRun
    replicas: TrainingRun
    max_weight_difference: float
    collectives_per_step: int
    bytes_per_step: int


def compare(settings: DemoSettings) -> Comparison:
    """Trains on one device and on the replicas; shows progress on stderr.

    Args:
        settings: What to train, on which devices.

    Returns:
        Results of both.

    Raises:
        UsageError: A setting names something that does not exist here.
        DemoError: The data cannot be had, or the training diverged.
    """
    _check_backend()
    _plugin.install()
    _check_optimizer(settings.optimizer)
    strategy = _make_strategy(settings)
    data = load_data(settings.data)
    console = Console(stderr=True)
    replica_model = build_model(data, settings.optimizer, strategy)
    _show_start(console, settings, data, replica_model, strategy)
    with TrainingProgress(console, settings.epochs) as progress:
        model = build_model(data, settings.optimizer, "one_device")
        one_device = train(model, data, settings, progress.callback("one device"))
        label = _count(strategy.num_replicas_in_sync, "replica")
        replicas = train(replica_model, data, settings, progress.callback(label))
    _check_finite(settings, one_device, replicas)
    rows = slice(0, settings.batch_size)
    report = load().step_report(replica_model, data.x_train[rows], data.y_train[rows])
    return Comparison(
        settings=settings,
        devices=tuple(strategy.devices),
        strategy=strategy.name,
        num_replicas=strategy.num_replicas_in_sync,
        one_device=one_device,
        replicas=replicas,
        max_weight_difference=_largest_difference(model, replica_model),
        collectives_per_step=report.collectives,
        bytes_per_step=report.bytes_sent,
    )


def _check_backend() -> None:
    backend = keras.config.backend()
    if backend != "jax":
        raise UsageError(
            "the demo runs on Keras' JAX backend. Received: KERAS_BACKEND="
            f"{backend}. Unset KERAS_BACKEND, or set it to jax."
        )


def _check_optimizer(name: str) -> None:
    known = sorted(
        key.lower()
        for key, value in vars(keras.optimizers).items()
        if isinstance(value, type)
        and issubclass(value, keras.optimizers.Optimizer)
        and value is not keras.optimizers.Optimizer
        # It wraps an optimizer, so its name alone makes none.
        and value is not keras.optimizers.LossScaleOptimizer
    )
    if name.lower() in known:
        return
    close = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    raise UsageError(
        f"--optimizer must name a Keras optimizer. Received: {name!r}. {hint}"
        f"Known names: {', '.join(known)}."
    )


def _make_strategy(settings: DemoSettings) -> Strategy:
    try:
        strategy_class: Any = get_strategy_class(settings.strategy, source="--strategy")
    except UnknownStrategyError as error:
        raise UsageError(str(error)) from error
    names = choose_devices(keras.distribution.list_devices(), settings.devices)
    if settings.strategy == "one_device":
        return strategy_class(device=names[0])
    return strategy_class(devices=names)


def _show_start(
    console: Console,
    settings: DemoSettings,
    data: ImageData,
    model: keras.Model,
    strategy: Strategy,
) -> None:
    batch_rows = min(settings.batch_size, len(data.x_train))
    # What `fit` does before its first step; the picture is read off the arrays.
    load().place_model(model, strategy)
    held = held_by_devices(model, strategy.devices, batch_rows)
    picture = mesh_text(strategy.devices, held, columns=console.width)
    try:
        picture.encode(console.encoding)
    except UnicodeEncodeError:
        picture = to_ascii(picture)
    lines = [
        f"Data: {data.name}, {len(data.x_train)} images to train and "
        f"{len(data.x_test)} to validate, {data.num_classes} classes",
        f"Each step: a global batch of {_count(batch_rows, 'row')} over "
        f"{_count(strategy.num_replicas_in_sync, 'replica')} ({strategy.name})",
        picture,
    ]
    print("\n".join(lines), file=sys.stderr, flush=True)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _check_finite(settings: DemoSettings, *runs: TrainingRun) -> None:
    # JSON has no NaN, and a comparison of diverged trainings says nothing.
    if not all(math.isfinite(run.final_loss) for run in runs):
        raise DemoError(
            f"the training diverged with --optimizer {settings.optimizer}: the losses "
            f"are {', '.join(str(run.final_loss) for run in runs)}. "
            "Try --optimizer adam."
        )


def _largest_difference(one: keras.Model, other: keras.Model) -> float:
    pairs = zip(one.get_weights(), other.get_weights(), strict=True)
    return max(float(np.max(np.abs(a - b))) for a, b in pairs)
