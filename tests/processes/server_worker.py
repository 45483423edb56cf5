"""A worker whose variables are split over its own devices, mirrored between workers."""

import sys

import cluster
import keras
import numpy as np
import server_worker_names
import training

import keras_mirror as km


def split(variable):
    return len({str(s.index) for s in variable.value.addressable_shards})


found = {}
for shard in ("optimizer", "parameters"):
    strategy = km.ParameterServerStrategy(
        shard=shard, min_shard_elements=8, heartbeat_seconds=15
    )
    assert dict(strategy.mesh.shape) == {"mirror": 2, "server": 2}
    km.set_strategy(strategy)
    for name in server_worker_names.NAMES:
        found[f"{shard} {name}"] = training.run(name)
    keras.utils.set_random_seed(7)
    model = training.compiled(training.mlp())
    model.fit(training.X, training.Y, batch_size=8, verbose=0)
    km.check_consistency(model)
    model.save(f"{sys.argv[1]}/{shard}.keras")
    saving = km.ShardedCheckpoint(f"{sys.argv[1]}/{shard}")
    saving.save(model)
    saving.close()
    kept = model.get_weights()
    model.fit(training.X, training.Y, batch_size=8, verbose=0)
    saving.restore(model)
    for restored, value in zip(model.get_weights(), kept, strict=True):
        np.testing.assert_array_equal(restored, value)
    found[f"{shard} saved"] = model.get_weights()
    kernel, slot = model.trainable_variables[0], model.optimizer.variables[2]
    found[f"{shard} split"] = [split(kernel), split(slot)]
cluster.save(sys.argv[1], strategy.worker_index, found)
