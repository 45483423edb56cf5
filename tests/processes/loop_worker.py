"""A worker with a training loop of its own: run, reduce and gather."""

import sys

import cluster
import jax
import keras
import numpy as np
import training

import keras_mirror as km

strategy = km.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(7)
model = training.mlp()
optimizer = km.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
optimizer.build(model.trainable_variables)
total = keras.Variable(0.0, aggregation="sum")
rows = keras.metrics.Sum()


def step(x, y):
    def loss(trainable):
        y_pred, _ = model.stateless_call(trainable, [], x)
        return keras.ops.mean((y - y_pred) ** 2)

    weights = model.trainable_variables
    value, grads = jax.value_and_grad(loss)([w.value for w in weights])
    optimizer.apply(grads, weights)
    total.assign_add(keras.ops.sum(y))
    rows.update_state(keras.ops.ones(x.shape[:1]))
    return value, y


found = {"losses": [], "gathered": []}
data = [(training.X[i : i + 8], training.Y[i : i + 8]) for i in (0, 8, 16)]
for batch in strategy.distribute_dataset(data):
    value, y = strategy.run(step, batch)
    found["losses"].append(float(strategy.reduce("mean", value)))
    found["gathered"].append(np.asarray(strategy.gather(y, axis=0)))
found["values"] = [np.asarray(v) for v in value.values]
found["weights"] = model.get_weights()
found["total"], found["rows"] = float(total.value), float(rows.result())
found["mean"] = float(strategy.reduce("mean", strategy.run(lambda a: a, (3.0,))))
cluster.save(sys.argv[1], strategy.worker_index, found)
