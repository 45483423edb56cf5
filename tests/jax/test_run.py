"""strategy.run, reduce, gather and distribute_dataset: loops of one's own."""

import gc
import types
import weakref

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from parity import assert_same, mirrored

import keras_mirror as km
from keras_mirror import errors

X = np.arange(24, dtype="float32").reshape(8, 3)


def test_each_replica_gets_its_rows_and_knows_its_place():
    strategy = mirrored()
    (x,) = list(strategy.distribute_dataset([X]))

    def fn(x, scale, *, shift):
        here = km.replica_context()
        assert here.num_replicas == 4 and here.axis_name == "replica"
        assert x.shape == (2, 3)
        return {"sum": jnp.sum(x) * scale + shift, "id": here.replica_id}

    found = strategy.run(fn, (x, 2.0), {"shift": jnp.float32(1.0)})
    want = X.reshape(4, 6).sum(axis=1) * 2 + 1
    assert_same("sums", list(found["sum"].values), list(want))
    assert [int(v) for v in found["id"].values] == [0, 1, 2, 3]
    assert km.replica_context() is None


def test_reduce_and_gather_match_numpy():
    strategy = mirrored()
    (x,) = list(strategy.distribute_dataset([X]))
    rows = strategy.run(lambda x: x * 2, (x,))
    parts = (X * 2).reshape(4, 2, 3)
    assert_same("sum", strategy.reduce("sum", rows), parts.sum(axis=0))
    assert_same("mean", strategy.reduce("MEAN", rows), parts.mean(axis=0))
    assert_same("rows", strategy.reduce("sum", rows, axis=0), parts.sum(axis=(0, 1)))
    assert_same("last", strategy.reduce("mean", rows, axis=-1), parts.mean(axis=(0, 2)))
    assert_same("gather 0", strategy.gather(rows, axis=0), X * 2)
    want = np.concatenate(list(parts), axis=1)
    assert_same("gather 1", strategy.gather(rows, axis=1), want)


def test_results_of_one_run_enter_the_next():
    strategy = mirrored()
    first = strategy.run(lambda: km.replica_context().replica_id * 1.0)
    second = strategy.run(lambda v: v + 10, (first,))
    assert [float(v) for v in second.values] == [10, 11, 12, 13]


def test_models_and_variables_may_be_arguments():
    strategy = mirrored()
    (x,) = list(strategy.distribute_dataset([X]))
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    factor = keras.Variable(2.0)
    found = strategy.run(lambda m, f, x: m(x) * f, (model, factor, x))
    assert_same("outputs", strategy.gather(found, 0), model.predict(X, verbose=0) * 2)


def test_collectives_work_inside_run():
    strategy = mirrored()
    (x,) = list(strategy.distribute_dataset([X]))
    total = strategy.run(lambda x: jax.lax.psum(x.sum(), "replica"), (x,))
    assert [float(v) for v in total.values] == [X.sum()] * 4


def test_a_training_loop_matches_one_device():
    def prepare():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        optimizer = km.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9))
        optimizer.build(model.trainable_variables)
        trainable = [v.value for v in model.trainable_variables]
        state = [v.value for v in optimizer.variables]

        def step(trainable, state, x):
            def loss(trainable):
                y_pred, _ = model.stateless_call(trainable, [], x)
                return jnp.mean(y_pred**2)

            grads = jax.grad(loss)(trainable)
            return optimizer.stateless_apply(state, grads, trainable)

        return trainable, state, step

    strategy = mirrored()
    trainable, state, step = prepare()
    for x in strategy.distribute_dataset([X, X + 1, X - 1]):
        found = strategy.run(step, (trainable, state, x))
        trainable, state = jax.tree.map(lambda v: v.values[0], found)
    want, want_state, one = prepare()
    for x in (X, X + 1, X - 1):
        want, want_state = one(want, want_state, x)
    assert_same("weights", trainable, want)


def test_model_and_optimizer_may_be_built_by_the_first_run():
    strategy = mirrored()
    x, y = X / 24, X[:, :1] / 24
    batch = next(iter(strategy.distribute_dataset([(x, y)])))

    def model_and_optimizer(wrap):
        keras.utils.set_random_seed(5)
        model = keras.Sequential(
            [keras.layers.Dense(4, "tanh", name="a"), keras.layers.Dense(1, name="b")]
        )
        return model, wrap(keras.optimizers.SGD(0.1, momentum=0.9))

    def step_of(model, optimizer):
        def step(x, y):
            if not model.built:
                model(x)
            weights = model.trainable_variables

            def loss(values):
                y_pred, _ = model.stateless_call(values, [], x)
                return jnp.mean((y - y_pred) ** 2)

            value, grads = jax.value_and_grad(loss)([w.value for w in weights])
            optimizer.apply(grads, weights)
            return value

        return step

    model, optimizer = model_and_optimizer(km.DistributedOptimizer)
    step = step_of(model, optimizer)
    found = [float(strategy.reduce("mean", strategy.run(step, batch))) for _ in "123"]
    plain, optimizer = model_and_optimizer(lambda inner: inner)
    step = step_of(plain, optimizer)
    assert_same("losses", found, [float(step(x, y)) for _ in "123"])
    assert_same("weights", model.get_weights(), plain.get_weights())
    assert np.isfinite(model(x)).all()


def test_an_array_on_another_device_arrives_whole():
    strategy = mirrored()
    x = jax.device_put(X, jax.devices()[3])
    found = strategy.run(lambda x: x, (x,))
    assert_same("arrived", list(found.values), [X] * 4)


def test_a_batch_that_does_not_divide_is_refused():
    strategy = mirrored()
    with pytest.raises(km.errors.UnevenBatchError, match=r"\(6, 3\).*4 replicas"):
        list(strategy.distribute_dataset([X, X[:6]]))
    with pytest.raises(km.errors.UnevenBatchError):
        list(strategy.distribute_dataset([(X, X[:4])]))


def test_assigned_variables_are_put_together():
    strategy = mirrored()
    (x,) = list(strategy.distribute_dataset([X]))
    mean = keras.Variable(1.0)
    total = keras.Variable(1.0, aggregation="sum")
    count = keras.Variable(3, dtype="int32", aggregation="only_first_replica")
    seed = keras.random.SeedGenerator(5)
    before = np.asarray(seed.state)

    def fn(x):
        mean.assign(mean + jnp.sum(x))
        total.assign_add(jnp.sum(x))
        count.assign_add(1)
        return keras.random.uniform((3,), seed=seed)

    drawn = strategy.run(fn, (x,))
    assert len({tuple(v.tolist()) for v in drawn.values}) == 4
    assert_same("mean", mean, 1 + X.sum() / 4)
    assert_same("total", total, 1 + X.sum())
    assert_same("count", count, 4)
    assert_same("seed", seed.state, before + [0, 1])


def test_summed_variables_may_be_set_anew():
    strategy = mirrored()
    (x,) = list(strategy.distribute_dataset([X]))
    total = keras.Variable(5.0, aggregation="sum")
    mean = keras.metrics.Mean()

    def fn(x):
        total.assign(jnp.sum(x))
        mean.reset_state()
        mean.update_state(x)
        return mean.result()

    for _ in range(3):
        strategy.run(fn, (x,))
        assert_same("total", total, X.sum())
        assert_same("mean", float(mean.result()), float(X.mean()))


def test_results_can_be_read_under_a_mesh_of_the_users_own():
    strategy = mirrored()
    (x,) = list(strategy.distribute_dataset([X]))
    with jax.set_mesh(jax.make_mesh((4,), ("data",))):
        found = strategy.run(lambda x: x, (x,))
        assert_same("values", list(found.values), list(X.reshape(4, 2, 3)))
        assert_same("gather", strategy.gather(found, axis=0), X)
        assert_same("reduce", strategy.reduce("sum", found, axis=0), X.sum(axis=0))
        assert "PerReplica" in repr(found)


def test_a_layer_with_state_and_dropout_can_be_called():
    strategy = mirrored()
    (x,) = list(strategy.distribute_dataset([X]))
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
        ]
    )
    strategy.run(lambda x: model(x, training=True), (x,))
    moving = np.asarray(model.layers[0].moving_mean)
    assert_same("moving mean", moving, 0.01 * X.mean(axis=0))


def test_a_function_is_traced_once_for_arguments_of_one_kind():
    strategy = mirrored()
    weight = keras.Variable(np.float32(2.0))  # 2.0 would make it of weak type
    traced = types.SimpleNamespace(times=0)

    def step(x, scale):
        traced.times += 1
        weight.assign(weight + 1)
        return jnp.sum(x) * weight * scale

    def total(scale, rows=X):
        (x,) = strategy.distribute_dataset([rows])
        return float(strategy.reduce("sum", strategy.run(step, (x, scale))))

    assert_same("first", total(2.0), X.sum() * 3 * 2)
    before = traced.times
    weight.assign(9.0)
    assert_same("new value", total(2.0, X + 1), (X + 1).sum() * 10 * 2)
    assert traced.times == before
    # Other programs: 3.0 is no 2.0, nor is it 3; four rows are not eight. Each
    # is traced once more to find the variables.
    for number, arguments in enumerate([(3.0,), (3,), (0.0,), (2.0, X[:4])], 1):
        total(*arguments)
        assert traced.times == before + 2 * number
    strategy.run(step, (X, -0.0))
    assert traced.times == before + 10


scale, weights = 1.0, {"w": jnp.ones(3)}


def scaled():
    return scale * weights["w"]


class Scaling:
    def __init__(self, factor):
        self.factor = factor

    def step(self):
        return scaled() * self.factor


def test_what_is_bound_anew_around_a_function_is_seen():
    global scale
    strategy = mirrored()
    one, two = Scaling(1.0), Scaling(2.0)
    shift = 0.0

    def step():
        return scaled() + shift

    def found(fn):
        return np.asarray(strategy.run(fn).values[0])[0]

    assert [found(f) for f in (one.step, two.step, step)] == [1, 2, 1]
    scale = 3.0
    assert [found(f) for f in (one.step, two.step, step)] == [3, 6, 3]
    weights["w"] = weights["w"] * 2
    assert [found(f) for f in (one.step, two.step, step)] == [6, 12, 6]
    shift = 1.0
    assert found(step) == 7


def test_a_function_and_what_it_holds_are_let_go():
    strategy = mirrored()

    def run_once():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        strategy.run(lambda x: model(x), (X,))
        return weakref.ref(model)

    gone = run_once()
    keras.utils.clear_session()
    gc.collect()
    assert gone() is None


WRONG = {
    "reduction": (lambda s, v: s.reduce("max", v), km.errors.OptionValueError, "'max'"),
    "plain value": (
        lambda s, v: s.reduce("sum", 3.0),
        km.errors.PerReplicaValueError,
        "run",
    ),
    "no axis": (
        lambda s, v: s.gather(v, axis=0),
        km.errors.PerReplicaValueError,
        "axis=0",
    ),
    "far axis": (
        lambda s, v: s.reduce("sum", v, axis=5),
        km.errors.PerReplicaValueError,
        "axis=5",
    ),
    "no function": (lambda s, v: s.run(3), km.errors.RunArgumentError, "callable"),
    "no tuple": (
        lambda s, v: s.run(jnp.sum, jnp.ones(3)),
        km.errors.RunArgumentError,
        "tuple",
    ),
    "text": (
        lambda s, v: s.run(lambda: "a"),
        km.errors.PerReplicaValueError,
        "'a' of type str",
    ),
    "nested": (
        lambda s, v: s.run(lambda: s.run(lambda: 1.0)),
        km.errors.RunArgumentError,
        "outside of a replica",
    ),
    "new layer": (
        lambda s, v: s.run(lambda x: keras.layers.Dense(2)(x), (X,)),
        km.errors.RunArgumentError,
        "variables at every call",
    ),
    "inside jit": (
        lambda s, v: jax.jit(lambda x: s.run(jnp.sum, (x,)).stacked)(X),
        km.errors.RunArgumentError,
        "outside of `jax.jit`",
    ),
    "other strategy": (
        lambda s, v: mirrored(2).run(jnp.sum, (v,)),
        km.errors.RunArgumentError,
        "same strategy",
    ),
    "no dict": (
        lambda s, v: s.run(jnp.sum, (X,), [1]),
        km.errors.RunArgumentError,
        "dict",
    ),
    "no data": (
        lambda s, v: s.distribute_dataset(3),
        km.errors.RunArgumentError,
        "iterable",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name):
    call, error, text = WRONG[name]
    strategy = mirrored()
    scalars = strategy.run(lambda: jnp.float32(1))
    with pytest.raises(error, match=text) as caught:
        call(strategy, scalars)
    assert "Received" in str(caught.value)


def test_a_lone_worker_has_a_mesh_of_workers_and_devices():
    with pytest.warns(errors.AloneWarning):
        strategy = km.MultiWorkerMirroredStrategy()
    assert dict(strategy.mesh.shape) == {"worker": 1, "device": 4}
    x = np.arange(8, dtype="float32")

    def step(rows):
        here = km.replica_context()
        assert rows.shape == (2,) and here.axis_name == ("worker", "device")
        return jax.lax.psum(rows.sum(), here.axis_name), rows, here.replica_id

    (batch,) = strategy.distribute_dataset([x])
    total, rows, replica = strategy.run(step, (batch,))
    assert [float(v) for v in total.values] == [28] * 4
    assert [int(v) for v in replica.values] == [0, 1, 2, 3]
    np.testing.assert_array_equal(strategy.gather(rows, axis=0), x)
    doubled = strategy.run(step, (jax.jit(lambda a: 2 * a)(batch),))[1]
    np.testing.assert_array_equal(strategy.gather(doubled, axis=0), 2 * x)
