"""Device names, and the tf.distribute strategy over some of them."""

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def local_devices() -> list[str]:
    """Names of this process' devices of the default kind."""
    for kind in ("GPU", "CPU"):
        found = tf.config.list_logical_devices(kind)
        if found:
            return [f"{kind.lower()}:{number}" for number in range(len(found))]
    return []


def host_devices() -> list[str]:
    """Names of the devices that compute in host memory."""
    count = len(tf.config.list_logical_devices("CPU"))
    return [f"cpu:{number}" for number in range(count)]


def native(devices: Sequence[str]) -> tf.distribute.Strategy:
    """What runs a function once per replica, and adds up what the replicas return."""
    return _native(tuple(name.upper() for name in devices))


@functools.cache  # it has threads, which it never ends
def _native(devices: tuple[str, ...]) -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(list(devices))


def same_place(variable: tf.Variable, device: str) -> bool:
    """Whether a variable lies on the device of this name."""
    return variable.device.lower().endswith(f"device:{device}")


def moved(variable: Any, device: str) -> tf.Variable:
    """A variable like this one, with its value, on the device of this name."""
    with tf.device(device.upper()):
        return tf.Variable(
            tf.identity(variable),
            dtype=variable.dtype,
            trainable=variable.trainable,
            name=variable.name.partition(":")[0],
            aggregation=variable.aggregation,
        )
