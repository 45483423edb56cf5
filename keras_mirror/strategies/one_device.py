"""Everything on one device."""

from typing import Any

from keras_mirror import _engine
from keras_mirror.strategies.base import Strategy, check_device


class OneDeviceStrategy(Strategy):
    """Keeps the variables and runs the step on one device.

    Use it to force one device under any scope or switch, or to name the device.

    Args:
        device: For example "cpu:0" or "gpu:1". None means the first device.

    Raises:
        UnknownDeviceError: There is no such device.

    Example:

    ```python
    model.compile("adam", "mse", distribution=km.OneDeviceStrategy("gpu:1"))
    ```
    """

    name = "one_device"

    def __init__(self, device: object = None):
        available = _engine.load().local_devices()
        if device is None:
            device = available[0]
        super().__init__([check_device(device, available, argument="device")])

    def get_config(self) -> dict[str, Any]:
        """The arguments that make an equal strategy."""
        return {"device": self.devices[0]}
