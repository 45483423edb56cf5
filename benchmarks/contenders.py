"""The four ways to train that are compared, behind one interface."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import keras
import models
import numpy as np
from handwritten import Loop
from watching import LiveBytes, Traffic, traffic

import keras_mirror as km
from keras_mirror._engine import load

Optimizer = Callable[[], keras.optimizers.Optimizer]


class Contender:
    """One way to train a model.

    `build` makes the model, `start` gets it ready to train, `fit` trains on each
    batch once; the time of `fit`, with all that it does around its steps, counts.
    """

    name = ""
    title = ""

    def __init__(self, devices: list[jax.Device], optimizer: Optimizer):
        self.devices = devices
        self.optimizer = optimizer
        self.model: Any = None

    def build(self, case: models.Case) -> None:
        self.model = case.build()

    def start(self) -> None:
        raise NotImplementedError

    def fit(
        self, x: np.ndarray, y: np.ndarray, live_bytes: LiveBytes | None = None
    ) -> None:
        raise NotImplementedError

    def weights(self) -> list[np.ndarray]:
        return [np.asarray(value) for value in self.model.trainable_variables]

    def traffic(self, x: np.ndarray, y: np.ndarray) -> Traffic:
        """What the compiled step sends for the batch x, y."""
        raise NotImplementedError


class HandWritten(Contender):
    """The yardstick: see `handwritten.py`."""

    name = "hand_written"
    title = "by hand"

    def start(self) -> None:
        self.loop = Loop(self.model, self.optimizer(), models.loss(), self.devices)

    def fit(
        self, x: np.ndarray, y: np.ndarray, live_bytes: LiveBytes | None = None
    ) -> None:
        look = live_bytes.look if live_bytes else None
        self.loop.fit(x, y, models.BATCH_SIZE, after_step=look)

    def weights(self) -> list[np.ndarray]:
        return self.loop.weights()

    def traffic(self, x: np.ndarray, y: np.ndarray) -> Traffic:
        return traffic(self.loop.lower(x, y), len(self.devices))


class Look(keras.callbacks.Callback):
    """Measures live arrays after each batch."""

    def __init__(self, live_bytes: LiveBytes):
        super().__init__()
        self._live_bytes = live_bytes

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._live_bytes.look()


class OneDevice(Contender):
    """Plain Keras."""

    name = "one_device"
    title = "one device"

    @contextmanager
    def during(self) -> Iterator[None]:
        """What must hold while the model is built, compiled and trained."""
        yield

    def compile_options(self) -> dict[str, Any]:
        return {}

    def build(self, case: models.Case) -> None:
        with self.during():
            super().build(case)

    def start(self) -> None:
        with self.during():
            self.model.compile(
                optimizer=self.optimizer(),
                loss=models.loss(),
                metrics=["accuracy"],
                **self.compile_options(),
            )

    def fit(
        self, x: np.ndarray, y: np.ndarray, live_bytes: LiveBytes | None = None
    ) -> None:
        with self.during():
            self.model.fit(
                x,
                y,
                batch_size=models.BATCH_SIZE,
                shuffle=False,
                verbose=0,
                callbacks=[Look(live_bytes)] if live_bytes else None,
            )

    def traffic(self, x: np.ndarray, y: np.ndarray) -> Traffic:
        return Traffic(0, 0)


class DataParallel(OneDevice):
    """What Keras has on the JAX backend."""

    name = "data_parallel"
    title = "DataParallel"

    def __init__(self, devices: list[jax.Device], optimizer: Optimizer):
        super().__init__(devices, optimizer)
        self._distribution = keras.distribution.DataParallel()

    @contextmanager
    def during(self) -> Iterator[None]:
        keras.distribution.set_distribution(self._distribution)
        try:
            yield
        finally:
            keras.distribution.set_distribution(None)

    def traffic(self, x: np.ndarray, y: np.ndarray) -> Traffic:
        model = self.model
        state = [
            [variable.value for variable in group]
            for group in (
                model.trainable_variables,
                model.non_trainable_variables,
                model.optimizer.variables,
                model.metrics_variables,
            )
        ]
        layout = self._distribution.get_data_layout(x.shape).backend_layout
        rows = jax.sharding.NamedSharding(
            layout.mesh, jax.sharding.PartitionSpec(layout.spec[0])
        )
        # As Keras compiles it: the state leaves the step laid out as it came.
        kept = jax.tree.map(lambda value: value.sharding, state)
        with self.during():
            step = jax.jit(model.train_step, out_shardings=(None, tuple(kept)))
            lowered = step.lower(tuple(state), jax.device_put((x, y), rows))
            return traffic(lowered, len(self.devices))


class Mirrored(OneDevice):
    """keras_mirror."""

    name = "keras_mirror"
    title = "keras_mirror"

    def compile_options(self) -> dict[str, Any]:
        return {"distribution": km.MirroredStrategy()}

    def traffic(self, x: np.ndarray, y: np.ndarray) -> Traffic:
        report = load().step_report(self.model, x, y)
        return Traffic(report.collectives, report.bytes_sent)


CONTENDERS: tuple[type[Contender], ...] = (
    HandWritten,
    Mirrored,
    DataParallel,
    OneDevice,
)
