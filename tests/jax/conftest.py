"""Leaves Keras and keras_mirror as each test found them."""

import gc
import itertools
import logging

import jax
import keras
import pytest
from parity import compiled, mlp, run_on_one_device, train_on_numbers

import keras_mirror as km

# What the imports made stays for good; without it each collection below is 50
# times faster.
gc.freeze()
_tests = itertools.count(1)
_TESTS_PER_COLLECTION = 10


@pytest.fixture(autouse=True, scope="session")
def each_program_is_compiled_once(tmp_path_factory):
    """Most of the time goes to compilation, and most tests share their programs.

    The folder is this process's own: JAX does not write its entries atomically.
    """
    if keras.config.backend() != "jax":
        return
    folder = tmp_path_factory.mktemp("compiled_programs")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(autouse=True)
def clean_global_state():
    yield
    km.set_strategy(None)
    keras.distribution.set_distribution(None)
    keras.config.set_dtype_policy("float32")
    keras.utils.clear_session(free_memory=False)
    # A model and its jitted steps are a reference cycle, and a run of hundreds of tests
    # would otherwise hold them all. To collect takes half a second.
    if next(_tests) % _TESTS_PER_COLLECTION == 0:
        gc.collect()


class _Raises(logging.Handler):
    def emit(self, record):
        raise AssertionError(self.format(record))


@pytest.fixture(autouse=True)
def no_analysis_fails():
    """A fault of the row analysis only costs speed, so a test must be told of it."""
    logger, handler = logging.getLogger("keras_mirror"), _Raises(logging.WARNING)
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)


@pytest.fixture(scope="session")
def one_device():
    """The MLP of `parity` after `train_on_numbers`, by plain Keras."""
    return run_on_one_device(mlp, compiled(), train_on_numbers)
