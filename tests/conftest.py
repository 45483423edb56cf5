"""The environment of every test: four virtual CPU devices, on the JAX backend.

With `KERAS_BACKEND=tensorflow` the same tests run there (processes/test_tensorflow.py).

Set before Keras or JAX is imported, and inherited by the processes that tests
start. A test that needs another backend or device count runs in a process of
its own, with these variables overridden.

`tests/jax` must stay a plain folder: an `__init__.py` there would make
`import jax` find the tests.
"""

import os

DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
# Two thirds of the time to compile, and tests hardly do anything else. The passes that
# place and merge collectives are the same. The demo, the notebooks, the benchmarks and
# Keras' own tests run with XLA as users have it. (With optimization level 0 XLA gives
# NaN for GroupNormalization on one device.)
QUICK_FLAG = "--xla_cpu_use_fusion_emitters=false"

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if DEVICE_COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} {DEVICE_COUNT_FLAG}=4 {QUICK_FLAG}".strip()

if os.environ["KERAS_BACKEND"] == "tensorflow":
    import tensorflow as tf

    four = [tf.config.LogicalDeviceConfiguration()] * 4
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, four)
