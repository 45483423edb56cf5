"""TensorFlow's tutorial "Multi-worker training with Keras"; one line is another.

https://www.tensorflow.org/tutorials/distribute/multi_worker_with_keras
(on the digits of scikit-learn, since MNIST must be downloaded).
"""

import json
import os
import sys

import cluster
import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import keras_mirror as km

per_worker_batch_size = 64
tf_config = json.loads(os.environ["TF_CONFIG"])
num_workers = len(tf_config["cluster"]["worker"])

strategy = km.MultiWorkerMirroredStrategy()  # tf.distribute.MultiWorkerMirrored...

global_batch_size = per_worker_batch_size * num_workers


def digits_dataset(batch_size):
    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).astype(np.float32).reshape(-1, 8, 8)
    return (
        tf.data.Dataset.from_tensor_slices((x, y.astype(np.int64)))
        .shuffle(2000)
        .repeat()
        .batch(batch_size)
    )


def build_and_compile_cnn_model():
    model = keras.Sequential(
        [
            keras.layers.InputLayer(shape=(8, 8)),
            keras.layers.Reshape(target_shape=(8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.SGD(learning_rate=0.05),
        metrics=["accuracy"],
    )
    return model


multi_worker_dataset = digits_dataset(global_batch_size)
with strategy.scope():
    multi_worker_model = build_and_compile_cnn_model()
history = multi_worker_model.fit(multi_worker_dataset, epochs=3, steps_per_epoch=30)

path = os.path.join(sys.argv[1], "model.keras")
multi_worker_model.save(path)
found = {"history": history.history, "weights": multi_worker_model.get_weights()}
cluster.save(sys.argv[1], strategy.worker_index, found)
