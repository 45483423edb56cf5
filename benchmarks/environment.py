"""What must be set before JAX and Keras are imported."""

import os

VIRTUAL_DEVICES = 4
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


def prepare() -> None:
    """Asks for the JAX backend and for virtual CPU devices.

    The flag concerns the CPU alone: on a machine with GPUs, JAX uses those.
    """
    os.environ.setdefault("KERAS_BACKEND", "jax")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    flags = os.environ.get("XLA_FLAGS", "")
    if DEVICE_COUNT_FLAG not in flags:
        flag = f"{DEVICE_COUNT_FLAG}={VIRTUAL_DEVICES}"
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()
