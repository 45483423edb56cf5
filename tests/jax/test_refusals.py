"""What is refused, how the error reads, and that nothing has changed afterwards."""

import os
import signal
import subprocess
import sys
import threading
import warnings

import keras
import numpy as np
import pytest

import keras_mirror as km
from keras_mirror import _plugin, errors

rng = np.random.default_rng(0)
X = rng.normal(size=(12, 5)).astype("float32")
Y = rng.normal(size=(12, 2)).astype("float32")


def mlp():
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])


def compiled(**options):
    model = mlp()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", **options)
    return model


def everything(model):
    """What a refused call must not change."""
    return (
        model.optimizer,
        model.loss,
        [np.asarray(v) for v in model.variables + model.optimizer.variables],
        km.get_strategy(),
        keras.distribution.distribution(),
        [v.value.sharding for v in model.variables],
    )


def assert_unchanged(model, before):
    after = everything(model)
    assert after[0] is before[0] and after[1] == before[1]
    for a, b in zip(after[2], before[2], strict=True):
        np.testing.assert_array_equal(a, b)
    assert after[3:] == before[3:]


def data_parallel():
    return keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"])


REFUSED = {
    "unknown name": (
        lambda: {"distribution": "miror"},
        errors.UnknownStrategyError,
        "Did you mean 'mirrored'",
    ),
    "no strategy": (
        lambda: {"distribution": 4},
        errors.StrategyTypeError,
        "Received: 4 of type int",
    ),
    "eager replicas": (
        lambda: {
            "distribution": km.MirroredStrategy(view="replica"),
            "run_eagerly": True,
        },
        errors.IncompatibleOptionsError,
        "run_eagerly=True",
    ),
    "replicas without jit": (
        lambda: {
            "distribution": km.MirroredStrategy(view="replica"),
            "jit_compile": False,
        },
        errors.IncompatibleOptionsError,
        "jit_compile=False",
    ),
    "an axis beside a strategy": (
        lambda: {
            "distribution": "mirrored",
            "optimizer": km.DistributedOptimizer("sgd", axis_name="data"),
        },
        errors.IncompatibleOptionsError,
        "axis_name='data'",
    ),
    "a sum that Keras would not take": (
        lambda: {
            "distribution": data_parallel(),
            "optimizer": km.DistributedOptimizer("sgd", reduction="sum"),
        },
        errors.IncompatibleOptionsError,
        "reduction='sum'",
    ),
}


@pytest.mark.parametrize("bound", [None, "mirrored"])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_compile_changes_nothing(name, bound):
    options, error, text = REFUSED[name]
    model = compiled(distribution=bound)
    model.fit(X, Y, batch_size=4, verbose=0)
    before = everything(model)
    with pytest.raises(error, match=text) as caught:
        model.compile(**({"optimizer": "adam", "loss": "mae"} | options()))
    assert "Received" in str(caught.value)
    assert isinstance(caught.value, (ValueError, TypeError))
    assert_unchanged(model, before)
    model.fit(X, Y, batch_size=4, verbose=0)


DEVICES = {
    "missing": (["cpu:0", "cpu:9"], errors.UnknownDeviceError, "cpu:3"),
    "other kind": (["tpu:0"], errors.UnknownDeviceError, "tpu:0"),
    "twice": (["cpu:1", "CPU:1"], errors.DuplicateDeviceError, "more than once"),
    "none": ([], errors.NoDevicesError, "at least one"),
    "a number": (4, errors.UnknownDeviceError, "Received: 4"),
    "numbers": ([0, 1], errors.UnknownDeviceError, "Received: 0"),
    "nothing": ([None], errors.UnknownDeviceError, "Received: None"),
}


@pytest.mark.parametrize("name", DEVICES)
def test_wrong_devices_are_refused(name):
    devices, error, text = DEVICES[name]
    with pytest.raises(error, match=text) as caught:
        km.MirroredStrategy(devices=devices)
    assert "Received" in str(caught.value)


def test_device_spellings_of_tf_and_jax_are_understood():
    import jax

    spelled = ["/cpu:0", "CPU:1", "/device:CPU:2", jax.devices()[3]]
    assert km.MirroredStrategy(devices=spelled).num_replicas_in_sync == 4


def test_wrong_options_are_refused():
    with pytest.raises(errors.OptionValueError, match="'auto', 'replica', 'global'"):
        km.MirroredStrategy(view="both")
    with pytest.raises(errors.IncompatibleOptionsError, match="whole batch"):
        km.MirroredStrategy(view="replica", synchronize_batch_norm=True)


def test_wrong_device_is_refused_by_its_argument():
    with pytest.raises(errors.UnknownDeviceError, match="`device`.*'cpu:9'"):
        km.OneDeviceStrategy("cpu:9")


def test_a_flag_must_be_a_bool():
    with pytest.raises(errors.OptionValueError, match="synchronize_batch_norm='no'"):
        km.MirroredStrategy(synchronize_batch_norm="no")


def test_wrong_switch_leaves_the_old_one():
    km.set_strategy("mirrored")
    before = km.get_strategy()
    for wrong in ("mirorred", 3):
        with pytest.raises(errors.KerasMirrorError):
            km.set_strategy(wrong)
    assert km.get_strategy() is before


def test_strategy_beside_another_kind_of_distribution_is_refused():
    model = compiled()
    before = everything(model)
    other = data_parallel()
    keras.distribution.set_distribution(other)
    try:
        with pytest.raises(errors.MixedDistributionError, match="DataParallel"):
            model.compile("sgd", "mse", distribution="mirrored")
        with pytest.raises(errors.MixedDistributionError):
            km.set_strategy("mirrored")
        with (
            pytest.raises(errors.MixedDistributionError),
            km.MirroredStrategy().scope(),
        ):
            pass
        assert keras.distribution.distribution() is other
    finally:
        keras.distribution.set_distribution(None)
    assert_unchanged(model, before)


def test_distribution_set_inside_a_scope_is_refused():
    with km.MirroredStrategy().scope():
        keras.distribution.set_distribution(data_parallel())
        with pytest.raises(errors.MixedDistributionError):
            compiled()
    assert keras.distribution.distribution() is None


def test_distribution_set_after_compile_is_refused_at_the_call():
    model = compiled(distribution="mirrored")
    weights = model.get_weights()
    keras.distribution.set_distribution(data_parallel())
    with pytest.raises(errors.MixedDistributionError):
        model.fit(X, Y, verbose=0)
    keras.distribution.set_distribution(None)
    for now, then in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(now, then)
    model.fit(X, Y, verbose=0)


def test_the_switch_gives_way_to_a_later_distribution_and_says_so():
    km.set_strategy("mirrored")
    keras.distribution.set_distribution(data_parallel())
    with pytest.warns(errors.StrategySetAsideWarning, match="DataParallel"):
        model = compiled()
    model.fit(X, Y, batch_size=4, verbose=0)
    assert len(model.variables[0].value.sharding.device_set) == 2


def test_data_that_fails_in_a_step_leaves_the_weights():
    model = compiled(distribution="mirrored")
    model.fit(X, Y, batch_size=4, verbose=0)
    before = everything(model)
    for call in (
        lambda: model.fit(X, np.zeros((12, 3), "float32"), batch_size=4, verbose=0),
        lambda: model.fit(X, np.zeros((12, 3), "float32"), batch_size=5, verbose=0),
        lambda: model.train_on_batch(X, np.zeros((12, 3), "float32")),
        lambda: model.evaluate(X, np.zeros((12, 3), "float32"), verbose=0),
        lambda: model.predict(np.zeros((12, 7), "float32"), verbose=0),
    ):
        with pytest.raises(Exception, match="shape|dimension|Shape|axis"):
            call()
        assert_unchanged(model, before)
    model.fit(X, Y, batch_size=4, verbose=0)


def fails_after(batches):
    for _ in range(batches):
        yield X[:4], Y[:4]
    raise OSError("no such shard")


class Fails(keras.callbacks.Callback):
    """Raises after the second batch of anything."""

    def on_train_batch_end(self, batch, logs=None):
        if batch >= 1:
            raise OSError("no such shard")

    on_test_batch_end = on_predict_batch_end = on_train_batch_end


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("culprit", ["data", "callback"])
def test_a_call_that_fails_late_leaves_the_weights(call, group, culprit):
    def call_it(model):
        with pytest.raises(OSError, match="no such shard"):
            if culprit == "callback":
                data = (X,) if call == "predict" else (X, Y)
                options = {"batch_size": 2, "callbacks": [Fails()], "verbose": 0}
                getattr(model, call)(*data, **options)
            elif call == "fit":
                model.fit(fails_after(4), steps_per_epoch=9, shuffle=False, verbose=0)
            else:
                getattr(model, call)(fails_after(4), steps=9, verbose=0)

    model = compiled(distribution="mirrored", steps_per_execution=group)
    model.fit(X, Y, batch_size=4, verbose=0)
    loaded = model.get_weights()
    call_it(model)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    model.set_weights(loaded)

    class Looks(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            # Keras brings the model up to date where a callback looks at it: not
            # with what the failed call has left.
            found.append(self.model.get_weights())

    found = []
    model.fit(X, Y, batch_size=4, callbacks=[Looks()], verbose=0)
    for kept, seen in zip(loaded, found[0], strict=True):
        np.testing.assert_array_equal(seen, kept)


@pytest.fixture
def ctrl_c_interrupts():
    """Also where a shell has started this in the background, and it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_ctrl_c_leaves_the_weights():
    """At any moment; plain Keras loses them most of the time."""
    x = np.ones((4096, 5), "float32")
    model = compiled(distribution="mirrored")
    model.fit(X, Y, batch_size=4, verbose=0)
    for seconds in (0.2, 0.25, 0.3, 0.35):
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            model.fit(x, x[:, :2], batch_size=4, epochs=1000, verbose=0)
        timer.join()
        assert all(np.isfinite(weight).all() for weight in model.get_weights())
        model.fit(X, Y, batch_size=4, verbose=0)


@pytest.mark.parametrize("name", ["fit", "evaluate", "predict"])
def test_ctrl_c_before_the_first_step_leaves_the_weights(name):
    class BrokenOff(keras.Sequential):
        is_broken_off = False

        def _get_jax_state(self, *args, **kwargs):
            state = super()._get_jax_state(*args, **kwargs)
            if self.is_broken_off and kwargs.get("purge_model_variables"):
                raise KeyboardInterrupt
            return state

    model = BrokenOff([keras.Input((5,)), keras.layers.Dense(2)])
    model.compile("adam", "mse", distribution="mirrored")
    data = (X,) if name == "predict" else (X, Y)
    getattr(model, name)(*data, batch_size=4, verbose=0)
    before = model.get_weights()
    model.is_broken_off = True
    with pytest.raises(KeyboardInterrupt):
        getattr(model, name)(*data, batch_size=4, verbose=0)
    model.is_broken_off = False
    for kept, value in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(kept, value)
    model.fit(X, Y, batch_size=4, verbose=0)


def test_a_batch_that_keras_own_distribution_cannot_take_is_named():
    model = compiled(distribution=data_parallel())
    with pytest.raises(errors.IndivisibleBatchError, match="mirrored"):
        model.fit(X, Y, batch_size=5, verbose=0)
    model.fit(X, Y, batch_size=4, verbose=0)


def test_data_that_raises_inside_a_group_of_steps_leaves_the_weights():
    model = compiled(distribution="mirrored", steps_per_execution=3)

    def data():
        yield X[:4], Y[:4]
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        model.fit(data(), shuffle=False, verbose=0)
    assert all(np.isfinite(w).all() for w in model.get_weights())
    model.fit(X, Y, batch_size=4, verbose=0)


def test_a_refused_compile_leaves_the_users_optimizer_as_it_was():
    inner = km.DistributedOptimizer("sgd", reduction="sum")
    scaled = keras.optimizers.LossScaleOptimizer(inner)
    model = compiled()
    with pytest.raises(ValueError):
        model.compile(scaled, "mse", loss_weights="wrong", distribution="mirrored")
    assert scaled.inner_optimizer is inner


def test_fit_inside_a_replica_is_refused_and_leaves_the_model():
    model = compiled(distribution="mirrored")
    with pytest.raises(errors.RunArgumentError, match="outside of a replica"):
        km.MirroredStrategy().run(lambda: model.predict(X, verbose=0))
    model.fit(X, Y, batch_size=4, verbose=0)


def test_keras_own_distribution_takes_over_a_model_compiled_again():
    model = compiled(distribution="mirrored")
    model.fit(X, Y, batch_size=4, verbose=0)
    keras.distribution.set_distribution(data_parallel())
    model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=4, verbose=0)
    assert len(model.variables[0].value.sharding.device_set) == 2


def test_an_untested_keras_is_named(monkeypatch):
    monkeypatch.setattr(keras, "__version__", "3.99.0")
    with pytest.warns(errors.UntestedKerasWarning, match="3.99.0"):
        _plugin._warn_untested()
    monkeypatch.setattr(keras, "__version__", _plugin.TESTED_KERAS[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _plugin._warn_untested()


def test_uninstalling_gives_keras_back():
    _plugin.uninstall()
    try:
        with pytest.raises(TypeError, match="distribution"):
            compiled(distribution="mirrored")
        compiled().fit(X, Y, verbose=0)
    finally:
        _plugin.install()
    compiled(distribution="mirrored").fit(X, Y, verbose=0)


def test_after_uninstalling_bound_models_train_as_plain_keras_does():
    model = compiled(distribution="mirrored")
    model.fit(X, Y, batch_size=5, verbose=0)
    _plugin.uninstall()
    try:
        model.fit(X, Y, batch_size=5, verbose=0)
        assert len(model.variables[0].value.sharding.device_set) == 1
    finally:
        _plugin.install()


def test_a_train_function_of_ones_own_is_kept():
    model = compiled(distribution="mirrored")
    model.make_train_function()
    made, called = model.train_function, []

    def own(state, iterator):
        called.append(1)
        return made(state, iterator)

    model.train_function = own
    model.fit(X, Y, batch_size=4, verbose=0)
    assert len(called) == 3


@pytest.mark.parametrize("backend", ["torch"])
def test_an_unsupported_backend_is_named(backend):
    program = (
        "import keras, keras_mirror as km\n"
        "m = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])\n"
        "m.compile('sgd', 'mse')\n"
        "for ask in (km.MirroredStrategy, lambda: km.set_strategy('mirrored'),\n"
        "            lambda: m.compile('sgd', 'mse', distribution='mirrored')):\n"
        "    try: ask()\n"
        "    except km.errors.UnsupportedBackendError as e: print(e)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if f"'{backend}'" in line]
    assert len(lines) == 3 and all("KERAS_BACKEND=jax" in line for line in lines)
