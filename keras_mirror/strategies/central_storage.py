"""Variables in one place, away from the devices that compute."""

from collections.abc import Sequence
from typing import Any

from keras_mirror import _engine, errors
from keras_mirror.strategies.base import Strategy, View, check_device, check_devices
from keras_mirror.strategies.mirrored import (
    check_batch_norm_option,
    warn_if_among_others,
)
from keras_mirror.strategies.reports import Summary


class CentralStorageStrategy(Strategy):
    """Synchronous training on the devices of this process, with variables in one place.

    For slots that do not fit on the devices that compute. These get a copy of the
    weights for each step and send their reduced gradients back; the optimizer runs
    where the variables are, and its slots never leave that place. The numbers are those
    of one device.

    Args:
        storage_device: Name of the device that holds the variables. None: host memory,
            where the processor then runs the optimizer.
        compute_devices: Names of the devices that compute. None: all devices of this
            process, without `storage_device` where one is named and others are there.
        view: As for `MirroredStrategy`.
        synchronize_batch_norm: As for `MirroredStrategy`.

    Raises:
        UnknownDeviceError: A device does not exist.
        DuplicateDeviceError: A device is named twice.
        OptionValueError: As for `MirroredStrategy`.

    Cost: beside the all-reduce of `MirroredStrategy`, the weights travel to every
    device that computes and the gradients back, once a step. A model with a
    `train_step` of its own runs whole on the devices that compute: its slots travel
    too.

    Example:

    ```python
    strategy = km.CentralStorageStrategy()
    model.compile("adam", "mse", distribution=strategy)
    print(strategy.summary(model))
    ```
    """

    name = "central_storage"

    def __init__(
        self,
        storage_device: object | None = None,
        compute_devices: Sequence[object] | None = None,
        *,
        view: View = "auto",
        synchronize_batch_norm: bool = False,
    ):
        check_batch_norm_option(synchronize_batch_norm, view)
        engine = _engine.load()
        local, host = engine.local_devices(), engine.host_devices()
        known = list(dict.fromkeys([*local, *host]))
        if storage_device is not None:
            place = check_device(storage_device, known, "storage_device")
        elif host:
            place = host[0]
        else:
            raise errors.UnknownDeviceError(None, known, "storage_device")
        others = [name for name in local if name != place]
        if compute_devices is None and storage_device is not None and others:
            compute_devices = others
        devices = check_devices(compute_devices, local)
        super().__init__(devices, view=view, available=local)
        warn_if_among_others(type(self).__name__)
        self._storage_device = place
        self._synchronize_batch_norm = synchronize_batch_norm

    @property
    def storage_device(self) -> str:
        """Name of the device that holds the variables."""
        return self._storage_device

    @property
    def compute_devices(self) -> tuple[str, ...]:
        """Names of the devices that compute, in replica order."""
        return self.devices

    @property
    def all_places(self) -> tuple[str, ...]:
        """Names of the storage device and of those that compute, once each."""
        return tuple(dict.fromkeys([self.storage_device, *self.devices]))

    @property
    def synchronize_batch_norm(self) -> bool:
        """Whether BatchNormalization sees the whole batch."""
        return self._synchronize_batch_norm

    def summary(self, model: Any) -> Summary:
        """Where each variable of a model lies, and how many bytes.

        As `ParameterServerStrategy.summary`.
        """
        holdings = _engine.load().holdings(model, self)
        return Summary(self.all_places, tuple(holdings))

    def held(self) -> list[list[str]]:
        """What each device holds, in words, for pictures of the mesh."""
        return [
            [*lines[:-1], f"variables of {self.storage_device}"]
            for lines in super().held()
        ]

    def get_config(self) -> dict[str, Any]:
        """The arguments that make an equal strategy."""
        return {
            "storage_device": self.storage_device,
            "compute_devices": list(self.devices),
            "view": self.view,
            "synchronize_batch_norm": self.synchronize_batch_norm,
        }
