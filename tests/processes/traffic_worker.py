"""A worker that says what its compiled steps send, and how its mesh lies."""

import re
import sys

import cluster
import jax
import keras
import numpy as np
import training

import keras_mirror as km
from keras_mirror._engine import load

strategy = km.MultiWorkerMirroredStrategy()
km.set_strategy(strategy)


def sent(width):
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(width),
            layers.BatchNormalization(),
            layers.Dropout(0.2),
            layers.Dense(width),
            layers.Dense(1),
        ]
    )
    training.compiled(model)
    rows = 2 * strategy.num_replicas_in_sync
    report = load().step_report(model, training.X[:rows], training.Y[:rows])
    operations = re.findall(r" (all-\w+|reduce-scatter)(?:-start)?\(", report.text)
    return {
        "view": report.view,
        "collectives": report.collectives,
        "operations": operations,
        "bytes_sent": report.bytes_sent,
        # The gradients, the moving statistics and the loss.
        "vector_bytes": 4 * (model.count_params() + 1),
    }


def seen_inside():
    here = km.replica_context()
    axis = here.axis_name
    return {
        "id": here.replica_id,
        "sum": jax.lax.psum(here.replica_id, axis),
        "most": jax.lax.pmax(here.replica_id, axis),
        "gathered": jax.lax.all_gather(here.replica_id, axis),
    }


found = {
    "mesh": dict(strategy.mesh.shape),
    "small": sent(16),
    "large": sent(400),
    "inside": jax.tree.map(
        lambda value: [np.asarray(v) for v in value.values],
        strategy.run(seen_inside),
        is_leaf=lambda value: hasattr(value, "stacked"),
    ),
    "trained": training.run("data: shuffled"),
}
cluster.save(sys.argv[1], strategy.worker_index, found)
