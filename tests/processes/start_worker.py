"""A worker whose seeds are its own: what it starts from must be the chief's."""

import random
import sys

import cluster
import jax
import keras
import numpy as np
import training

import keras_mirror as km

# Harmless without such devices, and seen in JAX' configuration.
options = {"local_device_ids": [0]}
strategy = km.MultiWorkerMirroredStrategy(runtime_options=options)
assert jax.config.values["jax_cuda_visible_devices"] == "0"
strategy = km.MultiWorkerMirroredStrategy(**strategy.get_config())  # the same again
me = strategy.worker_index
keras.utils.set_random_seed(100 + me)
found = {}
model = training.compiled(training.mlp(), distribution=strategy)
found["at compile"] = model.get_weights()
model.set_weights([weight + me for weight in model.get_weights()])
model.fit(training.X, training.Y, batch_size=8, epochs=2, verbose=0)  # shuffled
found["after fit"] = model.get_weights()
found["drawn"] = [float(np.random.normal()), random.random()]
unbuilt = keras.Sequential([keras.layers.Dropout(0.5), keras.layers.Dense(1)])
training.compiled(unbuilt, distribution=strategy)
for x, y in training.batches():
    unbuilt.train_on_batch(x, y)
found["built late"] = [np.asarray(variable) for variable in unbuilt.variables]
cluster.save(sys.argv[1], me, found)
