"""Leaves Keras and keras_mirror as each test found them."""

import gc

import keras
import pytest

import keras_mirror as km

# What the imports made stays for good; without it each collection below is 50
# times faster.
gc.freeze()


@pytest.fixture(autouse=True)
def clean_global_state():
    yield
    km.set_strategy(None)
    keras.distribution.set_distribution(None)
    keras.config.set_dtype_policy("float32")
    # Collects too: a model and its jitted steps are a reference cycle, and a run
    # of hundreds of tests would otherwise hold them all.
    keras.utils.clear_session()
