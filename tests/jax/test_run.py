"""strategy.run, reduce, gather and distribute_dataset: loops of one's own."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from parity import assert_same, mirrored

import keras_mirror as km

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
        trainable, state = jax.tree.map(
            lambda v: v.values[0],
            strategy.run(step, (trainable, state, x)),
            is_leaf=lambda v: hasattr(v, "stacked"),
        )
    want, want_state, one = prepare()
    for x in (X, X + 1, X - 1):
        want, want_state = one(want, want_state, x)
    assert_same("weights", trainable, want)


def test_batches_that_do_not_divide_reach_each_replica_whole():
    strategy = mirrored()
    (x,) = list(strategy.distribute_dataset([X[:6]]))
    found = strategy.run(lambda x: x.sum(), (x,))
    assert [float(v) for v in found.values] == [X[:6].sum()] * 4


def test_wrong_arguments_are_refused():
    strategy = mirrored()
    scalars = strategy.run(lambda: jnp.float32(1))
    with pytest.raises(km.errors.OptionValueError, match="'max'"):
        strategy.reduce("max", scalars)
    with pytest.raises(km.errors.PerReplicaValueError, match="run"):
        strategy.reduce("sum", 3.0)
    with pytest.raises(km.errors.PerReplicaValueError, match="scalar"):
        strategy.gather(scalars, axis=0)
