"""CentralStorageStrategy: variables in one place give the numbers of one device."""

import keras
import numpy as np
import pytest
from parity import (
    assert_same,
    compile_with,
    compiled,
    fit_evaluate_predict,
    fresh,
    mlp,
    numbers,
    run_on_one_device,
    run_on_replicas,
    sgd,
    train_on_numbers,
)
from test_optimizers import OPTIMIZERS, OPTIONS
from test_parameter_server import (
    MODELS,
    even_and_tail,
    optimizer_of,
    trained_on_one_device,
)

import keras_mirror as km
from keras_mirror import _engine, errors
from keras_mirror._jax.central import few_slots


def central(**options):
    """The variables on one device, three and a fourth one compute."""
    return km.CentralStorageStrategy(**options)


def assert_matches(got, want, tolerance=1e-5):
    assert_same("result", got.result, want.result, tolerance)
    assert_same("state", got.state, want.state, tolerance)


def places(model):
    """The devices on which any variable lies."""
    return {
        f"{device.platform}:{device.id}"
        for variable in [*model.variables, *model.optimizer.variables]
        for device in variable.value.devices()
    }


@pytest.mark.parametrize("name", [*OPTIMIZERS, *OPTIONS, "loss scaling"])
def test_every_optimizer_matches_one_device(name):
    def args():
        return {"optimizer": optimizer_of(name), "loss": "mse"}

    got = run_on_replicas(mlp, args, even_and_tail, strategy=central())
    assert_matches(got, trained_on_one_device(name))
    assert places(got.model) == {"cpu:0"}
    replica = 6 if "ema" in name else 12
    assert got.model.train_function.step.views == {"replica": replica, "global": 2}


@pytest.mark.parametrize("name", MODELS)
def test_models_match_one_device(name):
    build, (x, y), weights = MODELS[name]
    is_batch_norm = name == "BatchNormalization"
    options = {"test_batch_size": 24} if is_batch_norm else {}
    drive = fit_evaluate_predict(x, y, sample_weight=weights, **options)
    args = compiled(learning_rate=0.02, metrics=["mae"], weighted_metrics=["mse"])
    strategy = central(synchronize_batch_norm=is_batch_norm)
    want = run_on_one_device(build, args, drive)
    got = run_on_replicas(build, args, drive, strategy=strategy)
    assert_matches(got, want, 2e-2 if name == "mixed precision" else 1e-5)
    assert places(got.model) == {"cpu:0"}


def test_a_named_device_holds_the_variables_and_the_others_compute():
    strategy = central(storage_device="cpu:3")
    assert strategy.devices == ("cpu:0", "cpu:1", "cpu:2")
    want = run_on_one_device(mlp, compiled(), train_on_numbers)
    got = run_on_replicas(mlp, compiled(), train_on_numbers, strategy=strategy)
    assert_matches(got, want)
    assert places(got.model) == {"cpu:3"}
    held = strategy.summary(got.model).bytes_per_device
    assert held.pop("cpu:3") > 0 and set(held.values()) == {0}
    chosen = central(storage_device="cpu:1", compute_devices=["cpu:1", "cpu:2"])
    assert chosen.all_places == ("cpu:1", "cpu:2")
    assert_matches(
        run_on_replicas(mlp, compiled(), train_on_numbers, strategy=chosen), want
    )


@pytest.mark.parametrize("name", ["train_on_batch", "eager", "sum"])
def test_every_entry_matches_one_device(name):
    x, y = (part[:24] for part in numbers())

    def drive(model):
        if name == "train_on_batch":
            for start in (0, 8, 16):
                batch = slice(start, start + 8)
                found = model.train_on_batch(x[batch], y[batch])
        else:
            found = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
        return {"found": found, "called": model(x[:5])}

    def args(strategy):
        rate = 0.01
        if name == "sum" and strategy is None:
            rate *= 4
        optimizer = sgd(rate)
        if name == "sum" and strategy is not None:
            optimizer = km.DistributedOptimizer(sgd(rate), reduction="sum")
        return compiled(optimizer=optimizer, run_eagerly=name == "eager")

    want = run_on_one_device(mlp, args(None), drive)
    strategy = central()
    got = run_on_replicas(mlp, args(strategy), drive, strategy=strategy)
    assert_same("result", got.result, want.result)
    assert_same("weights", got.model.get_weights(), want.model.get_weights())


def test_a_trained_model_moves_there_and_back(tmp_path):
    model, want = compile_with(fresh()), compile_with(fresh())
    for distribution in (central(), "parameter_server", central(), "one_device"):
        model.compile(model.optimizer, "mse", distribution=distribution)
        want.compile(want.optimizer, "mse", distribution="one_device")
        got, expected = train_on_numbers(model), train_on_numbers(want)
        assert_same(str(distribution), got, expected)
        assert_same("weights", model.get_weights(), want.get_weights())
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras", compile=False)
        assert_same("loaded", loaded.get_weights(), model.get_weights(), 0)


def test_slots_take_no_memory_of_the_devices_that_compute():
    x, y = np.zeros((8, 256), "float32"), np.zeros((8, 256), "float32")
    held = {}
    for strategy in (km.MirroredStrategy(), central()):
        model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(256)])
        model.compile("adam", "mse", distribution=strategy)
        report = _engine.load().step_report(model, x, y)
        assert report.view == "replica" and report.collectives == 1
        held[strategy.name] = report.argument_bytes
    assert held["central_storage"] < 0.35 * held["mirrored"]


def test_a_failed_step_leaves_the_weights():
    model = compile_with(fresh(), distribution=central())
    train_on_numbers(model)
    before = model.get_weights()

    class Fail(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            raise OSError("the disk is full")

    with pytest.raises(OSError):
        model.fit(*numbers(), batch_size=8, verbose=0, callbacks=[Fail()])
    assert_same("weights", model.get_weights(), before, 0)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"storage_device": "cpu:9"}, errors.UnknownDeviceError, "`storage_device`"),
        ({"compute_devices": ["cpu:9"]}, errors.UnknownDeviceError, "cpu:9"),
        ({"compute_devices": []}, errors.NoDevicesError, r"\[\]"),
        ({"view": "all"}, errors.OptionValueError, "'all'"),
    ],
)
def test_wrong_options_are_refused(options, error, text):
    with pytest.raises(error, match=text):
        central(**options)


def test_slots_that_the_loss_does_not_read_are_not_copied():
    model = compile_with(fresh(), distribution=central())
    train_on_numbers(model)
    slots = [variable.value for variable in model.optimizer.variables]
    kept = [slot for slot in few_slots(model, slots) if slot is not None]
    assert [slot.size for slot in kept] == [1, 1, 1]  # counter, rate, a bias of one


def test_a_second_fit_with_moving_averages_goes_on():
    optimizer = keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5)
    model = fresh()
    model.compile(optimizer, "mse", distribution=central())
    losses = [train_on_numbers(model)["history"]["loss"][-1] for _ in "12"]
    assert losses[1] < losses[0]
