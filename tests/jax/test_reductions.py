"""What must be reduced on purpose in the replica view, one test a line.

`view="replica"` forces the view, so that a missing reduction cannot hide behind the
global view. Each test fails when its reduction is taken out of `_jax`.
"""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from parity import assert_same, check, mirrored

ROWS = 24  # in batches of 8: only even batches
rng = np.random.default_rng(2)
X = rng.normal(size=(ROWS, 5)).astype("float32") * np.linspace(0.2, 3, ROWS)[:, None]
X = X.astype("float32")
Y = np.tanh(X @ rng.normal(size=(5, 2))).astype("float32")
WEIGHTS = np.linspace(0.1, 2.0, ROWS).astype("float32")


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def mlp(**options):
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(6, activation="tanh", **options),
            keras.layers.Dense(2, **options),
        ]
    )


def train(model, x=X, y=Y, **options):
    options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0} | options
    return {"history": model.fit(x, y, **options).history}


def replicas():
    return mirrored(view="replica")


def views(model):
    """The views in which the model has trained."""
    return set(model.train_function.step.views)


def test_gradients_are_averaged():
    _, got = check(
        mlp, lambda: {"optimizer": sgd(), "loss": "mse"}, train, strategy=replicas()
    )
    assert views(got.model) == {"replica"}


@pytest.mark.parametrize(
    "reduction", ["sum", "mean", "sum_over_batch_size", "mean_with_sample_weight"]
)
def test_loss_denominators_are_those_of_the_whole_batch(reduction):
    lengths = np.tile([1, 1, 2, 2, 5, 5, 6, 6], 3)
    ids = np.where(
        np.arange(6) < lengths[:, None], rng.integers(1, 9, (ROWS, 6)), 0
    ).astype("int32")

    def build():
        return keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                keras.layers.Embedding(9, 4, mask_zero=True),
                keras.layers.LSTM(4, return_sequences=True),
                keras.layers.Dense(1),
            ]
        )

    def compile_args():
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        rate = 0.001 if reduction == "sum" else 0.1
        return {"optimizer": keras.optimizers.SGD(rate, momentum=0.9), "loss": loss}

    targets = (ids[..., None] * 0.1).astype("float32")
    weights = WEIGHTS[:, None] * np.ones(6, "float32")
    _, got = check(
        build,
        compile_args,
        lambda model: train(model, ids, targets, sample_weight=weights),
        strategy=replicas(),
    )
    assert views(got.model) == {"replica"}


def test_weighted_metrics_of_masked_outputs_match_one_device():
    lengths = np.tile([1, 1, 2, 2, 5, 5, 6, 6], 3)
    ids = np.where(np.arange(6) < lengths[:, None], 3, 0).astype("int32")

    def build():
        return keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                keras.layers.Embedding(9, 4, mask_zero=True),
                keras.layers.Dense(1),
            ]
        )

    weights = np.ones((ROWS, 6), "float32")
    targets = np.where(ids[..., None] == 0, 50.0, 0.1).astype("float32")
    check(
        build,
        lambda: {"optimizer": sgd(), "loss": "mse", "weighted_metrics": ["mae"]},
        lambda model: train(model, ids, targets, sample_weight=weights),
        strategy=replicas(),
    )


class CountsSteps(keras.layers.Layer):
    def build(self, shape):
        self.steps = self.add_weight(
            shape=(), initializer="zeros", trainable=False, aggregation="sum"
        )

    def call(self, x):
        self.steps.assign(self.steps + 1)
        return x


def test_a_counter_of_steps_counts_each_step_once():
    check(
        lambda: keras.Sequential(
            [keras.Input((5,)), CountsSteps(), keras.layers.Dense(2)]
        ),
        lambda: {"optimizer": sgd(), "loss": "mse"},
        train,
    )


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jax.numpy.clip(g, -0.01, 0.01),))


class Clips(keras.layers.Layer):
    def call(self, x):
        return clipped(x)


def test_gradients_are_as_large_inside_a_replica_as_on_one_device():
    check(
        lambda: keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(4), Clips(), keras.layers.Dense(2)]
        ),
        lambda: {"optimizer": sgd(), "loss": "mse"},
        train,
        strategy=replicas(),
    )


def test_regularizers_count_once():
    check(
        lambda: mlp(kernel_regularizer=keras.regularizers.L2(0.1)),
        lambda: {"optimizer": sgd(), "loss": "mse"},
        train,
        strategy=replicas(),
    )


class Weighted(keras.layers.Layer):
    """Adds a loss that is the same on each replica, as `add_loss` on weights is."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        self.add_loss(0.1 * keras.ops.sum(keras.ops.square(self.w)))
        return x * self.w


def test_losses_added_by_layers_count_once():
    check(
        lambda: keras.Sequential(
            [keras.Input((5,)), Weighted(), keras.layers.Dense(2)]
        ),
        lambda: {"optimizer": sgd(), "loss": "mse"},
        train,
        strategy=replicas(),
    )


class Keeps(keras.layers.Layer):
    """Keeps this replica's sum of inputs in a variable of a given aggregation."""

    def __init__(self, aggregation):
        super().__init__()
        self.aggregation = aggregation

    def build(self, shape):
        self.kept = self.add_weight(
            shape=(), initializer="ones", trainable=False, aggregation=self.aggregation
        )

    def call(self, x):
        self.kept.assign(self.kept * 0.5 + keras.ops.sum(x))
        return x


@pytest.mark.parametrize("aggregation", ["mean", "none", "sum", "only_first_replica"])
def test_state_follows_the_aggregation_of_its_variable(aggregation):
    model = keras.Sequential(
        [keras.Input((5,)), Keeps(aggregation), keras.layers.Dense(2)]
    )
    model.compile(sgd(), "mse", distribution=replicas())
    model.fit(X[:8], Y[:8], batch_size=8, shuffle=False, verbose=0)
    parts = X[:8].reshape(4, 2, 5).sum(axis=(1, 2))
    want = {
        "mean": 0.5 + parts.mean(),
        "none": 0.5 + parts.mean(),
        "sum": 0.5 + parts.sum(),
        "only_first_replica": 0.5 + parts[0],
    }[aggregation]
    assert_same("kept", model.layers[0].kept, want)


class Custom(keras.Model):
    """Keras' guide to a train step of one's own, JAX style."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.total = keras.metrics.Mean(name="total")
        self.mae = keras.metrics.MeanAbsoluteError(name="mae")

    def build(self, shape):
        self.dense.build(shape)
        self.built = True

    def call(self, x):
        return self.dense(x)

    @property
    def metrics(self):
        return [self.total, self.mae]

    def objective(self, trainable, non_trainable, x, y):
        y_pred, non_trainable = self.stateless_call(trainable, non_trainable, x)
        return keras.ops.mean((y - y_pred) ** 2), (y_pred, non_trainable)

    def train_step(self, state, data):
        trainable, non_trainable, optimizer, metrics = state
        x, y = data[:2]
        gradient = jax.value_and_grad(self.objective, has_aux=True)
        (loss, (y_pred, non_trainable)), grads = gradient(
            trainable, non_trainable, x, y
        )
        trainable, optimizer = self.optimizer.stateless_apply(
            optimizer, grads, trainable
        )
        count = len(self.total.variables)
        total = self.total.stateless_update_state(metrics[:count], loss)
        mae = self.mae.stateless_update_state(metrics[count:], y, y_pred)
        logs = {
            "total": self.total.stateless_result(total),
            "mae": self.mae.stateless_result(mae),
            "plain": loss,
        }
        return logs, (trainable, non_trainable, optimizer, [*total, *mae])


def test_custom_train_step_reduces_gradients_metrics_and_logs():
    plain = []

    def build():
        model = Custom()
        model.build((None, 5))
        return model

    def drive(model):
        log = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: plain.append(float(logs["plain"]))
        )
        return train(model, callbacks=[log])

    _, got = check(build, lambda: {"optimizer": sgd()}, drive, strategy=replicas())
    assert views(got.model) == {"replica"}
    half = len(plain) // 2
    assert_same("plain scalars", plain[half:], plain[:half])


class CustomWithState(Custom):
    """Also keeps a sum of its inputs, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.keeps = Keeps("sum")
        self.dropout = keras.layers.Dropout(0.5, seed=3)

    def build(self, shape):
        self.keeps.build(shape)
        super().build(shape)

    def call(self, x):
        return self.dense(self.dropout(self.keeps(x), training=True))


def test_custom_train_step_merges_state_and_seeds():
    model = CustomWithState()
    model.build((None, 5))
    before = np.asarray(model.dropout.seed_generator.state)
    model.compile(sgd(), distribution=replicas())
    model.fit(X[:8], Y[:8], batch_size=8, shuffle=False, verbose=0)
    parts = X[:8].reshape(4, 2, 5).sum(axis=(1, 2))
    assert_same("kept", model.keeps.kept, 0.5 + parts.sum())
    after = on_all_replicas(model.dropout.seed_generator.state)
    assert after[0] == before[0] and after[1] > before[1]


def test_loss_trackers_of_several_outputs_are_summed():
    def build():
        x = keras.Input((5,))
        a = keras.layers.Dense(2, name="a")(x)
        b = keras.layers.Dense(2, name="b")(keras.ops.tanh(a))
        return keras.Model(x, {"a": a, "b": b})

    def compile_args():
        return {
            "optimizer": sgd(),
            "loss": {"a": "mse", "b": "mae"},
            "loss_weights": {"a": 0.3, "b": 2.0},
        }

    both = {"a": Y, "b": Y * 2}
    one, got = check(
        build, compile_args, lambda m: train(m, y=both), strategy=replicas()
    )
    assert "a_loss" in one.result["history"]
    assert views(got.model) == {"replica"}


def dropout_model():
    return keras.Sequential([keras.Input((50,)), keras.layers.Dropout(0.5, seed=3)])


class Masks(keras.Model):
    """Hands out the rows as dropout left them, through a metric-free output."""

    def __init__(self):
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5, seed=3)
        self.seen = self.add_weight(
            shape=(4, 50), trainable=False, initializer="zeros", aggregation="sum"
        )
        self.scale = self.add_weight(shape=(), initializer="ones")

    def build(self, shape):
        self.built = True

    def call(self, x, training=False):
        out = self.dropout(x, training=training) * self.scale
        context = _replica()
        place = 0 if context is None else context.replica_id
        mine = keras.ops.one_hot(place, 4)[:, None] * out[0][None, :]
        self.seen.assign(self.seen + mine)
        return out


def _replica():
    import keras_mirror as km

    return km.replica_context()


def on_all_replicas(variable):
    """The value, checked to be the same on each device."""
    copies = [np.asarray(s.data) for s in variable.value.addressable_shards]
    assert len(copies) == 4
    for copy in copies[1:]:
        np.testing.assert_array_equal(copy, copies[0])
    return copies[0]


def masks_seen(seed):
    keras.utils.set_random_seed(seed)
    model = Masks()
    model.build((None, 50))
    model.compile(keras.optimizers.SGD(0.0), "mse", distribution=replicas())
    ones = np.ones((8, 50), "float32")
    model.fit(ones, ones, batch_size=8, verbose=0)
    return np.asarray(model.seen), on_all_replicas(model.dropout.seed_generator.state)


def test_dropout_masks_differ_between_replicas_and_repeat_under_a_seed():
    seen, state = masks_seen(1)
    assert len({tuple(row > 0) for row in seen}) == 4
    again, _ = masks_seen(1)
    assert_same("masks", again, seen)
    model = dropout_model()
    model.compile(keras.optimizers.SGD(0.0), "mse")
    seed = model.layers[0].seed_generator
    before = np.asarray(seed.state)
    # One step: the counter moved as on one device, and the seed is the original.
    assert state[0] == before[0]
    assert state[1] == before[1] + 1


@jax.custom_vjp
def noted(x, amax):
    """x; backwards, the largest |x| of the batch in the place of amax's gradient."""
    return x


noted.defvjp(
    lambda x, amax: (x, jnp.max(jnp.abs(x))), lambda largest, grad: (grad, largest)
)


class Overwritten(keras.layers.Layer):
    """Its variable takes a value as its "gradient", as float8 scales do."""

    def build(self, shape):
        self.amax = self.add_weight(shape=(), initializer="zeros")
        self.amax.overwrite_with_gradient = True

    def call(self, x):
        return noted(x, self.amax.value)


def test_overwritten_variables_take_the_largest_value_of_all_replicas():
    model = keras.Sequential([keras.Input((5,)), Overwritten(), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.01), "mse", distribution=replicas())
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    assert_same("amax", model.layers[0].amax, np.abs(X[:8]).max())


def test_optimizer_slots_are_equal_on_all_replicas():
    model = mlp()
    model.compile(keras.optimizers.Adam(0.01), "mse", distribution=replicas())
    train(model)
    for variable in model.optimizer.variables + model.variables:
        on_all_replicas(variable)
