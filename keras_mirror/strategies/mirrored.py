"""One process, many devices, the variables mirrored on each."""

import os
import warnings
from collections.abc import Sequence
from typing import Any

from keras_mirror import _engine, cluster, errors
from keras_mirror.strategies.base import Strategy, View, check_devices


def check_batch_norm_option(synchronize_batch_norm: object, view: object) -> None:
    """Raises unless the option is a bool that goes with the view."""
    if not isinstance(synchronize_batch_norm, bool):
        raise errors.OptionValueError(
            "synchronize_batch_norm", synchronize_batch_norm, (True, False)
        )
    if synchronize_batch_norm and view == "replica":
        raise errors.IncompatibleOptionsError(
            "synchronize_batch_norm=True",
            'view="replica"',
            "Whole-batch statistics need the whole batch in view.",
            'Leave view="auto".',
        )


def warn_if_among_others(strategy: str) -> None:
    """Warns where this process is one of many that were started together."""
    try:
        found = cluster.find(os.environ)
    except errors.ClusterSpecError:
        return  # said by the strategies that need a cluster
    if found is not None and (found.num_workers or 1) > 1:
        warning = errors.SeparateModelsWarning(
            strategy, found.index, found.num_workers, found.source
        )
        warnings.warn(warning, stacklevel=3)


class MirroredStrategy(Strategy):
    """Synchronous training on all devices of this process.

    Every device holds a full copy of the variables and works on its rows of each
    global batch; gradients are put together before they are applied, so the copies
    stay equal. Training gives the numbers of one device.

    Args:
        devices: Names such as ["gpu:0", "gpu:1"]. None means all devices of this
            process.
        view: How a train step is compiled.
            "auto": the replica view wherever each row's result depends on that row
            alone (found by looking at the traced program), else the global view.
            "replica": once per replica on its own rows, as tf.distribute does,
            also where replicas then see less than one device would (losses and
            layers that compare rows of a batch).
            "global": always the one-device program over sharded arrays.
        synchronize_batch_norm: Whether BatchNormalization takes its statistics
            over the whole batch, as on one device, rather than per replica.

    Raises:
        UnknownDeviceError: A device does not exist.
        DuplicateDeviceError: A device is named twice.
        OptionValueError: `view` is none of the three, or
            `synchronize_batch_norm` is no bool.
        IncompatibleOptionsError: `synchronize_batch_norm` with `view="replica"`.

    Cost: one all-reduce of the gradients per step, 2(n - 1)/n times their bytes
    sent by each of n devices.

    Example:

    ```python
    strategy = km.MirroredStrategy(devices=["gpu:0", "gpu:1"])
    model.compile("adam", "mse", distribution=strategy)
    model.fit(x, y, batch_size=256)  # 128 rows on each device
    ```
    """

    name = "mirrored"

    def __init__(
        self,
        devices: Sequence[object] | None = None,
        *,
        view: View = "auto",
        synchronize_batch_norm: bool = False,
    ):
        check_batch_norm_option(synchronize_batch_norm, view)
        available = _engine.load().local_devices()
        warn_if_among_others(type(self).__name__)
        super().__init__(check_devices(devices, available), view=view)
        self._synchronize_batch_norm = synchronize_batch_norm

    @property
    def synchronize_batch_norm(self) -> bool:
        """Whether BatchNormalization sees the whole batch."""
        return self._synchronize_batch_norm

    def get_config(self) -> dict[str, Any]:
        """The arguments that make an equal strategy."""
        return {
            **super().get_config(),
            "synchronize_batch_norm": self.synchronize_batch_norm,
        }
