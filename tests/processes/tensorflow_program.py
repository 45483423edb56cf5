"""What runs whole on TensorFlow, what is divided, and what is refused there."""

import json

import keras
import numpy as np
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
four = [tf.config.LogicalDeviceConfiguration()] * 4
tf.config.set_logical_device_configuration(cpu, four)

import keras_mirror as km  # noqa: E402

X = np.random.default_rng(0).normal(size=(24, 6)).astype("float32")
Y = np.tanh(X[:, :2])


class Mixes(keras.layers.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, axis=0)


class Own(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, *_, **__):
        return keras.ops.mean(keras.ops.square(y - y_pred)) ** 2


def contrastive(y, y_pred):
    return keras.ops.mean(keras.ops.matmul(y_pred, keras.ops.transpose(y_pred)) - 1)


def model(kind=keras.Sequential, *more):
    keras.utils.set_random_seed(7)
    layers = keras.layers
    return kind([keras.Input((6,)), layers.Dense(8, "tanh"), *more, layers.Dense(2)])


MODELS = {
    "plain": (model, "mse"),
    "mixing layer": (lambda: model(keras.Sequential, Mixes()), "mse"),
    "contrastive loss": (model, contrastive),
    "own compute_loss": (lambda: model(Own), "mse"),
}


def trained(name, strategy):
    make, loss = MODELS[name]
    built = make()
    built.compile("adam", loss, distribution=strategy)
    history = built.fit(X, Y, batch_size=8, epochs=2, verbose=0).history["loss"]
    values = [np.array(history), built.predict(X, verbose=0), *built.get_weights()]
    step = getattr(built.train_function, "step", None)
    return values, step


def refused(call):
    try:
        call()
    except km.errors.UnsupportedOnBackendError as error:
        return str(error)


found = {"off": {}, "whole": {}, "places": {}}
for name in MODELS:
    want, _ = trained(name, None)
    for kind in ("mirrored", "central_storage", "one_device"):
        got, step = trained(name, kind)
        key = f"{name}, {kind}"
        pairs = zip(got, want, strict=True)
        found["off"][key] = float(max(np.max(np.abs(a - b)) for a, b in pairs))
        data = (tf.constant(X[:8]), tf.constant(Y[:8]))
        found["whole"][key] = step.why_whole(data)
placed = model()
central = km.CentralStorageStrategy("cpu:3", ["cpu:0", "cpu:1"])
placed.compile("adam", "mse", distribution=central)
placed.fit(X, Y, batch_size=8, verbose=0)
variables = [*placed.variables, *placed.optimizer.variables]
found["places"] = sorted({v.value.device.lower()[-5:] for v in variables})
found["refused"] = [
    refused(km.ParameterServerStrategy),
    refused(lambda: km.MirroredStrategy().run(lambda: 0)),
    refused(lambda: km.CentralStorageStrategy().summary(placed)),
    refused(
        lambda: km.MultiWorkerMirroredStrategy(
            km.ClusterSpec(workers=["127.0.0.1:1", "127.0.0.1:2"], index=0)
        )
    ),
]
print(json.dumps(found))
