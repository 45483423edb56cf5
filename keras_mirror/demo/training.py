"""The classic program of the field, trained under one strategy."""

import random
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_mirror.demo.datasets import ImageData
from keras_mirror.demo.settings import DemoSettings
from keras_mirror.demo.timing import CompileClock, EpochClock

_SEED = 1


@dataclass(frozen=True)
class TrainingRun:
    """The results of one training.

    Attributes:
        final_loss: Training loss of the last epoch.
        accuracy: Training accuracy of the last epoch.
        val_accuracy: Accuracy on the validation data after the last epoch.
        examples_per_second: Rows trained per second; see `EpochClock`.
        compile_seconds: Time in `fit` in which JAX made programs; see
            `CompileClock`.
    """

    final_loss: float
    accuracy: float
    val_accuracy: float
    examples_per_second: float
    compile_seconds: float


def build_model(data: ImageData, optimizer: str, distribution: Any) -> keras.Model:
    """Builds and compiles the model, with the same weights in each call.

    Args:
        data: Decides the shapes of the input and of the output.
        optimizer: Name of a Keras optimizer.
        distribution: A strategy or the name of one.

    Returns:
        A model whose weights and optimizer slots exist.
    """
    _seed()
    model = keras.Sequential(
        [
            keras.layers.Input(data.x_train.shape[1:]),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(data.num_classes, activation="softmax"),
        ]
    )
    # In a dictionary since Keras' own signature, which type checkers read, does
    # not have `distribution`.
    options: dict[str, Any] = {
        "loss": "sparse_categorical_crossentropy",
        "metrics": ["accuracy"],
        "distribution": distribution,
    }
    model.compile(optimizer, **options)
    model.optimizer.build(model.trainable_variables)
    return model


def _seed() -> None:
    """Seeds the initializers (Python's generator) and the shuffle (NumPy's)."""
    # keras.utils.set_random_seed would do, but imports TensorFlow where it is
    # installed: seconds, and half a screen of its log.
    random.seed(_SEED)
    np.random.seed(_SEED)


def train(
    model: keras.Model,
    data: ImageData,
    settings: DemoSettings,
    progress: keras.callbacks.Callback,
) -> TrainingRun:
    """Fits the model, with the same order of the rows in each call.

    Args:
        model: What `build_model` returned.
        data: Rows for training and validation.
        settings: Epochs and batch size.
        progress: A callback that shows how far it is.

    Returns:
        Results and times.
    """
    _seed()
    silent: Any = 0  # Keras annotates `verbose` as a string alone.
    with CompileClock() as compile_clock:
        epoch_clock = EpochClock(compile_clock)
        history = model.fit(
            data.x_train,
            data.y_train,
            batch_size=settings.batch_size,
            epochs=settings.epochs,
            validation_data=(data.x_test, data.y_test),
            callbacks=[epoch_clock, progress],
            verbose=silent,
        ).history
        compile_seconds = compile_clock.seconds()
    return TrainingRun(
        final_loss=float(history["loss"][-1]),
        accuracy=float(history["accuracy"][-1]),
        val_accuracy=float(history["val_accuracy"][-1]),
        examples_per_second=epoch_clock.examples_per_second(len(data.x_train)),
        compile_seconds=compile_seconds,
    )
