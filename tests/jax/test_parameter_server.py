"""ParameterServerStrategy: split variables give the numbers of one device."""

import functools

import jax
import keras
import numpy as np
import pytest
from keras import layers, optimizers
from parity import (
    assert_same,
    assert_same_runs,
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
    weights_of_rows,
)
from test_optimizers import OPTIMIZERS, OPTIONS

import keras_mirror as km
from keras_mirror import _engine, errors

SHARDS = ("optimizer", "gradients", "parameters")
LEAST = 8  # elements; the models here are small


def servers(shard="parameters", **options):
    return km.ParameterServerStrategy(shard=shard, min_shard_elements=LEAST, **options)


def split_over(value):
    """Over how many devices an array is split."""
    parts = {str(shard.index) for shard in value.addressable_shards}
    return len(parts)


def even_and_tail(model):
    """Batches that the replicas divide; then the same with a short one at the end."""
    x, y = numbers()
    result, fits = {}, {"even": 24, "tail": 26}
    if model.optimizer.use_ema:
        del fits["even"]  # Keras cannot fit twice with moving averages
    for name, rows in fits.items():
        options = {"batch_size": 8, "shuffle": False, "verbose": 0}
        history = model.fit(x[:rows], y[:rows], epochs=2, **options).history
        result[name] = {
            "history": history,
            "weights": model.get_weights(),
            "slots": [np.asarray(v) for v in model.optimizer.variables],
        }
    return result


def optimizer_of(name):
    if name in OPTIMIZERS:
        return getattr(optimizers, name)(**OPTIMIZERS[name])
    if name == "loss scaling":
        inner = optimizers.Adam(0.01)
        return optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=3)
    return optimizers.SGD(0.1, momentum=0.9, **OPTIONS[name])


@functools.cache
def trained_on_one_device(name):
    compile_args = {"optimizer": optimizer_of(name), "loss": "mse"}
    return run_on_one_device(mlp, lambda: compile_args, even_and_tail)


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("name", [*OPTIMIZERS, *OPTIONS, "loss scaling"])
def test_every_optimizer_matches_one_device(name, shard):
    want = trained_on_one_device(name)
    got = run_on_replicas(
        mlp,
        lambda: {"optimizer": optimizer_of(name), "loss": "mse"},
        even_and_tail,
        strategy=servers(shard),
    )
    assert_same_runs(got, want)
    kernel = got.model.trainable_variables[0].value
    if "ema" not in name:  # its averages, which are slots, became the weights
        assert split_over(kernel) == (4 if shard == "parameters" else 1)
    for slot in got.model.optimizer.variables:
        if tuple(slot.shape) == kernel.shape:
            assert split_over(slot.value) == 4, slot.path


def batch_norm():
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8),
            layers.BatchNormalization(),
            layers.Activation("tanh"),
            layers.Dense(1),
        ]
    )


def masked():
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(8, 4, mask_zero=True),
            layers.LSTM(4, return_sequences=True),
            layers.Dense(1),
        ]
    )


def frozen():
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(8), layers.Dense(1)]
    )
    model.layers[0].trainable = False
    return model


def convolution():
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Reshape((6, 1)),
            layers.Conv1D(8, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )


def half():
    dtype = keras.dtype_policies.DTypePolicy("mixed_bfloat16")
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, "tanh", dtype=dtype),
            layers.Dense(1, dtype="float32"),
        ]
    )


class OwnStep(keras.Model):
    """Compares rows of the batch in a `train_step` of its own."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(8, "tanh")
        self.out = layers.Dense(1)

    def call(self, x):
        return self.out(self.dense(x))

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        spread = keras.ops.var(y_pred)
        return super().compute_loss(x, y, y_pred, sample_weight) + spread


def tokens(rows=26):
    found = np.arange(rows * 5).reshape(rows, 5) % 7
    found[::3, 3:] = 0
    return found


def attention():
    inputs = keras.Input((5, 8))
    x = layers.Dense(8, "tanh")(inputs)  # its gradient is a product over two axes
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    return keras.Model(inputs, layers.EinsumDense("abc,cd->abd", (5, 4))(x))


MODELS = {
    "attention": (
        attention,
        (
            numbers(26, 40)[0].reshape(26, 5, 8),
            numbers(26, 40, 20)[1].reshape(26, 5, 4),
        ),
        None,
    ),
    "weighted": (mlp, numbers(), weights_of_rows()),
    "BatchNormalization": (
        batch_norm,
        (numbers()[0][:24], numbers()[1][:24]),
        None,
    ),
    "masks": (masked, (tokens(), np.repeat(numbers()[1][:, None], 5, 1)), None),
    "frozen layers": (frozen, numbers(), None),
    "convolution": (convolution, numbers(), None),
    "mixed precision": (half, numbers(), None),
    "own compute_loss": (OwnStep, numbers(), None),
}


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("name", MODELS)
def test_models_match_one_device(name, shard):
    build, (x, y), weights = MODELS[name]
    options = {"test_batch_size": 24} if name == "BatchNormalization" else {}
    drive = fit_evaluate_predict(x, y, sample_weight=weights, **options)
    args = compiled(learning_rate=0.02, metrics=["mae"], weighted_metrics=["mse"])
    strategy = servers(shard)
    if name == "BatchNormalization":
        strategy = servers(shard, synchronize_batch_norm=True)
    tolerance = 2e-2 if name == "mixed precision" else 1e-5
    want = run_on_one_device(build, args, drive)
    got = run_on_replicas(build, args, drive, strategy=strategy)
    assert_same_runs(got, want, tolerance)


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("num_servers", [1, 2])
def test_groups_of_servers_mirror_each_other(shard, num_servers):
    strategy = servers(shard, num_servers=num_servers)
    assert dict(strategy.mesh.shape) == {
        "mirror": 4 // num_servers,
        "server": num_servers,
    }
    want = run_on_one_device(mlp, compiled(), train_on_numbers)
    got = run_on_replicas(mlp, compiled(), train_on_numbers, strategy=strategy)
    assert_same_runs(got, want)
    slot = got.model.optimizer.variables[2].value  # of the first kernel
    assert split_over(slot) == num_servers


def test_replicas_batch_statistics_and_sums_are_those_of_mirrored_training():
    def trained(strategy):
        args = compiled(optimizer=km.DistributedOptimizer(sgd(), reduction="sum"))
        drive = fit_evaluate_predict(*(part[:24] for part in numbers()))
        return run_on_replicas(batch_norm, args, drive, strategy=strategy)

    want = trained(km.MirroredStrategy())
    for shard in SHARDS:
        got = trained(servers(shard))
        assert got.model.train_function.step.views == {"replica": 6}
        assert_same(shard, got.state, want.state)
        assert_same(shard, got.result, want.result)


def test_a_trained_model_moves_to_servers_and_back():
    model = compile_with(fresh())
    want = compile_with(fresh())
    for distribution in (servers(), "mirrored", servers("optimizer"), "one_device"):
        optimizer = model.optimizer
        model.compile(optimizer, "mse", distribution=distribution)
        want.compile(want.optimizer, "mse", distribution="one_device")
        got, expected = train_on_numbers(model), train_on_numbers(want)
        assert_same(str(distribution), got, expected)
        assert_same("weights", model.get_weights(), want.get_weights())


@pytest.mark.parametrize("shard", SHARDS)
def test_files_are_whole_and_plain(shard, tmp_path):
    model = compile_with(fresh(), distribution=servers(shard))
    train_on_numbers(model)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_same("weights", loaded.get_weights(), model.get_weights(), 0)
    slots = [np.asarray(v) for v in model.optimizer.variables]
    assert_same("slots", [np.asarray(v) for v in loaded.optimizer.variables], slots, 0)
    other = compile_with(fresh(), distribution=servers("parameters", num_servers=2))
    other.load_weights(tmp_path / "model.weights.h5")
    x, _ = numbers()
    got, want = (m.predict(x, verbose=0) for m in (other, model))
    assert_same("loaded", got, want)


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.parametrize("name", ["numpy", "generator", "train_on_batch", "eager"])
def test_every_entry_matches_one_device(name):
    x, y = numbers()

    def batches():
        for start in range(0, len(x), 8):
            yield x[start : start + 8], y[start : start + 8]

    def drive(model):
        if name == "train_on_batch":
            return [model.train_on_batch(*batch) for batch in batches()]
        if name == "generator":
            history = model.fit(batches(), shuffle=False, verbose=0).history
        else:
            history = model.fit(x, y, batch_size=8, verbose=0).history
        return {"history": history, "called": model(x[:5])}

    args = compiled(run_eagerly=name == "eager")
    want = run_on_one_device(mlp, args, drive)
    assert_same_runs(run_on_replicas(mlp, args, drive, strategy=servers()), want)


def test_by_name_and_by_environment(monkeypatch):
    model = compile_with(fresh(), distribution="parameter_server")
    train_on_numbers(model)
    monkeypatch.setenv("KERAS_MIRROR_STRATEGY", "parameter_server")
    assert isinstance(km.get_strategy(), km.ParameterServerStrategy)


def test_a_failed_step_leaves_the_weights():
    model = compile_with(fresh(), distribution=servers())
    x, y = numbers()
    train_on_numbers(model)
    before = model.get_weights()

    class Fail(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            raise OSError("the disk is full")

    with pytest.raises(OSError):
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[Fail()])
    assert_same("weights", model.get_weights(), before, 0)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"mode": "async"}, errors.AsynchronousModeError, 'mode="sync"'),
        ({"max_staleness": 3}, errors.AsynchronousModeError, "max_staleness=3"),
        ({"num_workers": 2}, errors.AsynchronousModeError, "num_workers=2"),
        ({"mode": "often"}, errors.OptionValueError, "'often'"),
        ({"shard": "all"}, errors.OptionValueError, "'all'"),
        ({"num_servers": 3}, errors.ServerCountError, "Use one of 1, 2, 4"),
        ({"num_servers": 0}, errors.OptionValueError, "num_servers=0"),
        ({"num_servers": True}, errors.OptionValueError, "num_servers=True"),
        ({"min_shard_elements": 0}, errors.OptionValueError, "min_shard_elements=0"),
        ({"devices": ["cpu:9"]}, errors.UnknownDeviceError, "cpu:9"),
    ],
)
def test_wrong_options_are_refused(options, error, text):
    with pytest.raises(error, match=text):
        km.ParameterServerStrategy(**options)


def test_a_view_that_splits_cannot_have_is_refused():
    model = OwnStep()
    model.compile(sgd(), "mse", distribution=servers(view="replica"))
    with pytest.raises(errors.ReplicaViewError, match="shard='parameters'"):
        model.fit(*numbers(), batch_size=8, verbose=0)


def test_slots_stay_split_in_the_program_of_a_step():
    """No slot is gathered: the only gathers are those of the weights."""
    for shard, gathers in (("optimizer", 3), ("parameters", 3)):
        model = compile_with(fresh(), distribution=servers(shard))
        x, y = numbers()
        report = _engine.load().step_report(model, x[:8], y[:8])
        text = report.text
        assert report.view == "replica"
        assert len([1 for line in text.splitlines() if " all-gather(" in line]) == (
            gathers
        ), shard
    assert jax.device_count() == 4


VOCABULARY, WIDTH = 4096, 16


def embedding_model(tied=False):
    ids = keras.Input((6,), dtype="int32")
    table = layers.Embedding(VOCABULARY, WIDTH, name="table")
    hidden = layers.GlobalAveragePooling1D()(table(ids))
    # `Scores` reads the table as well, not by rows.
    outputs = Scores(table)(hidden) if tied else layers.Dense(1)(hidden)
    return keras.Model(ids, outputs)


class Scores(layers.Layer):
    """Likeness to each of the table's first rows."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.table.embeddings[:5]))


def words(rows=26):
    rng = np.random.default_rng(2)
    found = rng.integers(0, VOCABULARY, size=(rows, 6))
    found[0, :2] = -1, -VOCABULARY  # from the end, as `take` has it
    found[3] = found[6]  # the same rows on two replicas
    return found


@pytest.mark.parametrize("tied", [False, True], ids=["table", "tied"])
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam"])
def test_embeddings_that_are_split_match_one_device(name, tied):
    y = numbers(outputs=5 if tied else 1)[1]
    drive = fit_evaluate_predict(words(), y)

    def args():
        return {"optimizer": optimizer_of(name), "loss": "mse"}

    want = run_on_one_device(lambda: embedding_model(tied), args, drive)
    got = run_on_replicas(
        lambda: embedding_model(tied), args, drive, strategy=servers()
    )
    assert_same_runs(got, want)
    assert got.model.train_function.step.views == {"replica": 6, "global": 2}
    table = got.model.get_layer("table").embeddings.value
    assert {shard.data.shape for shard in table.addressable_shards} == {
        (VOCABULARY // 4, WIDTH)
    }


def test_only_the_rows_of_a_batch_travel():
    model = embedding_model()
    model.compile("sgd", "mse", distribution=servers())
    report = _engine.load().step_report(model, words(8), numbers(8)[1])
    assert report.view == "replica"
    assert report.bytes_sent < 4 * VOCABULARY * WIDTH / 8
    tied = embedding_model(tied=True)
    tied.compile("sgd", "mse", distribution=servers())
    whole = _engine.load().step_report(tied, words(8), numbers(8, outputs=5)[1])
    assert whole.bytes_sent > 4 * VOCABULARY * WIDTH * 3 / 4


def test_ids_beyond_the_table_give_what_one_device_gives():
    def drive(model):
        x = words(8)
        x[5, 2] = VOCABULARY
        model.fit(x, numbers(8)[1], batch_size=8, verbose=0)
        return np.isnan(model.get_weights()[0]).sum(axis=1).nonzero()[0]

    want = run_on_one_device(embedding_model, compiled(), drive)
    got = run_on_replicas(embedding_model, compiled(), drive, strategy=servers())
    np.testing.assert_array_equal(got.result, want.result)
    assert len(want.result)


def test_summary_and_estimate_say_what_devices_hold():
    strategy = servers()
    model = keras.Sequential(
        [keras.Input((64,)), layers.Dense(128, "relu"), layers.Dense(8)]
    )
    model.compile("adam", "mse", distribution=strategy)
    before = strategy.estimate(model, batch_size=16)
    assert not model.optimizer.built
    model.fit(np.zeros((16, 64)), np.zeros((16, 8)), verbose=0)
    held = {device: 0 for device in strategy.devices}
    for variable in {
        id(v): v
        for v in [
            *model.variables,
            *model.metrics_variables,
            *model.optimizer.variables,
        ]
    }.values():
        for shard in variable.value.addressable_shards:
            held[f"cpu:{shard.device.id}"] += shard.data.nbytes
    summary = strategy.summary(model)
    assert summary.bytes_per_device == held
    text = str(summary)
    assert "axis 1 split: 32 of 128 each" in text and "cpu:3: " in text
    page = summary._repr_html_()
    assert page.startswith("<div") and "width:100.0%" in page and "cpu:3" in page
    count, kernels = model.count_params(), 64 * 128 + 128 * 8 + 128 + 8
    assert count == kernels
    assert before[None].parameters == before["gradients"].parameters == 4 * count
    assert before["parameters"].parameters == count  # four bytes over four servers
    assert before["optimizer"].gradients == 4 * count
    assert before["gradients"].gradients == count
    counters = 8  # of Adam: its iterations and its rate
    assert before[None].slots == 8 * count + counters
    assert before["optimizer"].slots == 2 * count + counters
    # Of four rows: the inputs of both layers, and where relu lets pass.
    assert 4 * 4 * (64 + 128) <= before[None].activations <= 3 * 4 * 4 * (64 + 128)
    assert "(mirrored)" in str(before) and "parameters" in before._repr_html_()
    with pytest.raises(errors.OptionValueError, match="batch_size=0"):
        strategy.estimate(model, batch_size=0)
    own = OwnStep()
    for refused in (own, "x"):
        with pytest.raises(errors.ModelNotReadyError, match="is compiled"):
            strategy.estimate(refused)
        with pytest.raises(errors.ModelNotReadyError, match="is built"):
            strategy.summary(refused)
    own.compile("sgd", "mse")
    with pytest.raises(errors.UnknownInputsError, match="keras.Input"):
        strategy.estimate(own)


@pytest.mark.filterwarnings("ignore:The model.s `trainable` state:UserWarning")
def test_layers_may_be_frozen_and_thawed_between_fits():
    def drive(model):
        x, y = numbers()
        found = []
        for frozen in (False, True, False):
            model.layers[0].trainable = not frozen
            model.compile(sgd(), "mse", **model.km_distribution)
            model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
            model.layers[1].trainable = frozen  # seen by predict alone
            found.append(model.predict(x, verbose=0))
            model.layers[1].trainable = True
        return found

    def build(distribution):
        model = fresh()
        model.km_distribution = {"distribution": distribution}
        return model

    want = drive(build("one_device"))
    for strategy in (servers(), km.CentralStorageStrategy()):
        assert_same(strategy.name, drive(build(strategy)), want)
