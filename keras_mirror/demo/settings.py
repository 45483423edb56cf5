"""What the demo was asked to do, checked as far as no framework is needed."""

import difflib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from keras_mirror.errors import KerasMirrorError

DEFAULT_DEVICES = 4
# Keras' own default. It leaves a tail in every bundled data set's last step, so
# the demo shows that tails are right, too.
DEFAULT_BATCH_SIZE = 32
DEFAULT_EPOCHS = 5
NAMED_DATA = ("digits", "mnist")
_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


class UsageError(KerasMirrorError):
    """An argument that cannot be: exit code 2. The message is one line."""


class DemoError(KerasMirrorError):
    """The arguments are right and the work failed: exit code 1."""


@dataclass(frozen=True)
class DemoSettings:
    """The demo's arguments.

    Attributes:
        devices: How many devices; None means all accelerators, or 4 virtual CPU
            devices where there is none.
        strategy: Name of the strategy of the replicas.
        epochs: Passes over the training data.
        batch_size: Rows of the global batch.
        optimizer: Name of a Keras optimizer.
        data: "digits", "mnist" or the path of an .npz file.
    """

    devices: int | None = None
    strategy: str = "mirrored"
    epochs: int = DEFAULT_EPOCHS
    batch_size: int = DEFAULT_BATCH_SIZE
    optimizer: str = "adam"
    data: str = "digits"

    def check(self) -> None:
        """Refuses what is wrong whatever the devices and strategies are.

        Raises:
            UsageError: A number is below 1, the data file is missing, or one
                replica was asked for on several devices.
        """
        for name in ("devices", "epochs", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                option = "--" + name.replace("_", "-")
                raise UsageError(f"{option} must be at least 1. Received: {value}.")
        if self.data not in NAMED_DATA and not Path(self.data).is_file():
            raise UsageError(_missing_data_message(self.data))
        if self.strategy == "one_device" and (self.devices or 1) > 1:
            raise UsageError(
                "--strategy one_device uses one device. Received: --devices "
                f"{self.devices}. Leave --devices out, or pick --strategy mirrored."
            )

    def prepare_environment(self) -> None:
        """Sets the environment that Keras and JAX read when they are imported.

        What the user has set stays. Where JAX has been imported already, this
        has no effect and the devices are those that exist.
        """
        os.environ.setdefault("KERAS_BACKEND", "jax")
        if "jax" in sys.modules or host_device_count_is_set():
            return
        # Harmless beside an accelerator: the flag is for the CPU platform alone.
        flag = f"{_DEVICE_COUNT_FLAG}={self.devices or DEFAULT_DEVICES}"
        flags = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
        os.environ["XLA_FLAGS"] = flags.strip()


def host_device_count_is_set() -> bool:
    """Whether the environment says how many CPU devices JAX makes."""
    return (
        _DEVICE_COUNT_FLAG in os.environ.get("XLA_FLAGS", "")
        or "JAX_NUM_CPU_DEVICES" in os.environ
    )


def _missing_data_message(data: str) -> str:
    names = difflib.get_close_matches(data.lower(), NAMED_DATA, n=1)
    hint = f" Did you mean {names[0]!r}?" if names else ""
    return (
        "--data must be digits, mnist or the path of an .npz file. "
        f"Received: {data!r}, and there is no such file.{hint}"
    )
