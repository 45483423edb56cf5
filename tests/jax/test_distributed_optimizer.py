"""DistributedOptimizer in a compiled model and in loops of one's own."""

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from parity import assert_same, check, mirrored

import keras_mirror as km

rng = np.random.default_rng(4)
X = rng.normal(size=(26, 5)).astype("float32")
Y = rng.normal(size=(26, 2)).astype("float32")


def sgd(rate=0.1):
    return keras.optimizers.SGD(rate, momentum=0.9)


def mlp():
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(6, activation="tanh"),
            keras.layers.Dense(2),
        ]
    )


def fit(model):
    history = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return {"history": history}


def test_compiled_model_matches_one_device():
    _, got = check(
        mlp,
        lambda: {"optimizer": km.DistributedOptimizer(sgd()), "loss": "mse"},
        fit,
    )
    assert isinstance(got.model.optimizer, km.DistributedOptimizer)


def test_sum_is_the_mean_at_a_rate_times_the_replicas():
    def compile_args(summing):
        if summing:
            return km.DistributedOptimizer(sgd(0.01), reduction="sum")
        return sgd(0.04)

    weights = []
    for summing in (True, False):
        keras.utils.set_random_seed(3)
        model = mlp()
        model.compile(compile_args(summing), "mse", distribution=mirrored())
        fit(model)  # 26 rows by 8: even batches and a tail
        weights.append(model.get_weights())
    assert_same("weights", *weights)


def test_it_is_usable_as_the_inner_one():
    inner = sgd()
    wrapped = km.DistributedOptimizer(inner)
    model = mlp()
    model.compile(wrapped, "mse", distribution="mirrored")
    assert model.optimizer is wrapped
    model.optimizer.learning_rate = 0.05
    assert float(model.optimizer.learning_rate) == pytest.approx(0.05)
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    assert int(model.optimizer.iterations) == 1 == int(inner.iterations)
    assert [id(v) for v in wrapped.variables] == [id(v) for v in inner.variables]
    assert wrapped.momentum == 0.9
    wrapped.momentum = 0.8
    assert inner.momentum == 0.8


def loop_data():
    keras.utils.set_random_seed(5)
    model = mlp()
    trainable = [v.value for v in model.trainable_variables]
    non_trainable = [v.value for v in model.non_trainable_variables]

    def loss(trainable, x, y):
        y_pred, _ = model.stateless_call(trainable, non_trainable, x)
        return jnp.mean((y - y_pred) ** 2)

    return model, trainable, loss


def one_device_steps(steps=3):
    model, trainable, loss = loop_data()
    optimizer = sgd()
    optimizer.build(model.trainable_variables)
    state = [v.value for v in optimizer.variables]
    for _ in range(steps):
        grads = jax.grad(loss)(trainable, X[:24], Y[:24])
        trainable, state = optimizer.stateless_apply(state, grads, trainable)
    return trainable


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis_name", [None, "devices"])
def test_own_shard_map_loop_matches_one_device(check_vma, axis_name):
    model, trainable, loss = loop_data()
    optimizer = km.DistributedOptimizer(sgd(), axis_name=axis_name)
    optimizer.build(model.trainable_variables)
    state = [v.value for v in optimizer.variables]
    mesh = jax.make_mesh((4,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P(), P("devices"), P("devices")),
        out_specs=(P(), P()),
        check_vma=check_vma,
    )
    def step(trainable, state, x, y):
        grads = jax.grad(loss)(trainable, x, y)
        return optimizer.stateless_apply(state, grads, trainable)

    for _ in range(3):
        trainable, state = step(trainable, state, X[:24], Y[:24])
    assert_same("weights", trainable, one_device_steps())


def test_own_vmap_over_a_named_axis_matches_one_device():
    model, trainable, loss = loop_data()
    optimizer = km.DistributedOptimizer(sgd(), axis_name="rows")
    optimizer.build(model.trainable_variables)
    state = [v.value for v in optimizer.variables]

    @functools.partial(jax.vmap, in_axes=(None, None, 0, 0), axis_name="rows")
    def step(trainable, state, x, y):
        grads = jax.grad(loss)(trainable, x, y)
        return optimizer.stateless_apply(state, grads, trainable)

    for _ in range(3):
        found = step(trainable, state, X[:24].reshape(4, 6, 5), Y[:24].reshape(4, 6, 2))
        trainable, state = jax.tree.map(lambda value: value[1], found)
    assert_same("weights", trainable, one_device_steps())


def test_own_pmap_loop_matches_one_device():
    model, trainable, loss = loop_data()
    optimizer = km.DistributedOptimizer(sgd())
    optimizer.build(model.trainable_variables)
    state = [v.value for v in optimizer.variables]

    @functools.partial(jax.pmap, axis_name="devices")
    def step(trainable, state, x, y):
        grads = jax.grad(loss)(trainable, x, y)
        return optimizer.stateless_apply(state, grads, trainable)

    stack = functools.partial(jax.tree.map, lambda a: jnp.stack([a] * 4))
    trainable, state = stack(trainable), stack(state)
    x, y = X[:24].reshape(4, 6, 5), Y[:24].reshape(4, 6, 2)
    for _ in range(3):
        trainable, state = step(trainable, state, x, y)
    assert_same("weights", [t[3] for t in trainable], one_device_steps())


def test_without_an_axis_it_is_the_inner_optimizer():
    model, trainable, loss = loop_data()
    optimizer = km.DistributedOptimizer(sgd(), axis_name="devices")
    optimizer.build(model.trainable_variables)
    state = [v.value for v in optimizer.variables]
    for _ in range(3):
        grads = jax.grad(loss)(trainable, X[:24], Y[:24])
        trainable, state = optimizer.stateless_apply(state, grads, trainable)
    assert_same("weights", trainable, one_device_steps())


def test_all_replicas_skip_a_step_that_one_of_them_overflows():
    model, trainable, loss = loop_data()
    scaled = keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=4.0)
    optimizer = km.DistributedOptimizer(scaled)
    optimizer.build(model.trainable_variables)
    state = [v.value for v in optimizer.variables]

    @functools.partial(jax.pmap, axis_name="devices", out_axes=0)
    def step(x, y):
        grads = jax.grad(loss)(trainable, x, y)
        return optimizer.stateless_apply(state, grads, trainable)

    x = X[:24].reshape(4, 6, 5).copy()
    x[2, 0] = np.inf
    after, _ = step(x, Y[:24].reshape(4, 6, 2))
    for new, old in zip(after, trainable, strict=True):
        for replica in new:
            np.testing.assert_array_equal(replica, old)


def test_overwritten_variables_take_the_largest_value_in_a_loop_of_ones_own():
    scale = keras.Variable(np.zeros(3, "float32"))
    scale.overwrite_with_gradient = True
    weight = keras.Variable(np.zeros(3, "float32"))
    optimizer = km.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([scale, weight])
    state = [v.value for v in optimizer.variables]
    values = [scale.value, weight.value]

    @functools.partial(jax.pmap, axis_name="devices")
    def step(grad):
        return optimizer.stateless_apply(state, [grad, grad], values)[0]

    grads = rng.normal(size=(4, 3)).astype("float32")
    found = step(grads)
    assert_same("scale", found[0][2], grads.max(axis=0))
    assert_same("weight", found[1][2], -grads.mean(axis=0))


def test_ambiguous_and_missing_axes_are_refused():
    optimizer = km.DistributedOptimizer(sgd())
    optimizer.build(mlp().trainable_variables)
    named = km.DistributedOptimizer(sgd(), axis_name="nowhere")
    named.build(mlp().trainable_variables)
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(auto, auto))

    def applied(which):
        def step(x):
            return which.reduce_gradients([x] * 4)[0]

        return jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P())(jnp.ones(3))

    with pytest.raises(km.errors.ReplicaAxisError, match="'a', 'b'"):
        applied(optimizer)
    with pytest.raises(km.errors.ReplicaAxisError, match="nowhere"):
        applied(named)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: km.DistributedOptimizer(3), km.errors.NotAnOptimizerError),
        (
            lambda: km.DistributedOptimizer(km.DistributedOptimizer("sgd")),
            km.errors.NestedDistributedOptimizerError,
        ),
        (
            lambda: km.DistributedOptimizer("sgd", reduction="max"),
            km.errors.OptionValueError,
        ),
    ],
)
def test_wrong_arguments_are_refused(make, error):
    with pytest.raises(error, match="Received"):
        make()


def test_config_makes_an_equal_wrapper():
    wrapped = km.DistributedOptimizer(sgd(0.3), reduction="sum", axis_name="d")
    data = keras.saving.serialize_keras_object(wrapped)
    again = keras.saving.deserialize_keras_object(data)
    assert again.get_config() == wrapped.get_config()
