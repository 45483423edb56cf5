"""A worker whose variables are split: over its own devices, or over all workers'."""

import sys

import cluster
import keras
import numpy as np
import server_worker_names
import training

import keras_mirror as km
from keras_mirror._jax import state
from keras_mirror._jax.sharded import groups_of, layout_of


def parts(model, strategy, group, place):
    """Of how many parts of a variable this worker holds one in a step."""
    groups = [[v.value for v in g] for g in groups_of(model)]
    placed = state.place_state(groups, layout_of(model, strategy))
    array = placed.lists()[group][place]
    return array.size // array.addressable_data(0).size


found = {}
for kind in server_worker_names.KINDS:
    servers, shard = kind
    strategy = km.ParameterServerStrategy(
        shard=shard,
        num_servers=server_worker_names.SERVERS[servers],
        min_shard_elements=8,
        heartbeat_seconds=15,
    )
    km.set_strategy(strategy)
    for name in server_worker_names.NAMES:
        found[kind, name] = training.run(name)
    keras.utils.set_random_seed(7)
    model = training.compiled(training.mlp())
    model.fit(training.X, training.Y, batch_size=8, verbose=0)
    km.check_consistency(model)
    predicted = np.asarray(model(training.X))
    path = f"{sys.argv[1]}/{servers} {shard}"
    model.save(f"{path}.keras")
    saving = km.ShardedCheckpoint(path)
    saving.save(model)
    saving.close()
    kept = model.get_weights()
    model.fit(training.X, training.Y, batch_size=8, verbose=0)
    saving.restore(model)
    for restored, value in zip(model.get_weights(), kept, strict=True):
        np.testing.assert_array_equal(restored, value)
    found[kind] = {
        "weights": model.get_weights(),
        "predicted": predicted,
        "parts": [parts(model, strategy, 0, 0), parts(model, strategy, 2, 2)],
    }
cluster.save(sys.argv[1], strategy.worker_index, found)
