"""What `rows` finds out about a model: row by row, or rows mixed."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import keras_mirror as km

rng = np.random.default_rng(0)
L = keras.layers


def view(layers, shape=(6,), loss="mse", targets=None, dtype="float32"):
    """The view in which a model with these layers trains."""
    x = rng.uniform(1, 5, size=(8, *shape)).astype(dtype)
    model = keras.Sequential([keras.Input(shape, dtype=dtype), *layers])
    if targets is None:
        targets = np.zeros((8, *model.output_shape[1:]), "float32")
    model.compile("sgd", loss, distribution=km.MirroredStrategy())
    return view_of_a_step(model, x, targets)


def view_of_a_step(model, x, targets):
    model.train_on_batch(x, targets)
    (found,) = model.train_function.step.views
    return found


class Fn(L.Layer):
    """A layer that applies a function to its input and one weight."""

    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def build(self, shape):
        self.w = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return self.fn(x * self.w)


class Same(Fn):
    """The same for a function that keeps shapes, and cannot be built without one."""

    def compute_output_shape(self, shape):
        return shape


ROW_BY_ROW = {
    "dense": ([L.Dense(4)], (6,)),
    "batch norm": ([L.Dense(4), L.BatchNormalization()], (6,)),
    "dropout": ([L.Dense(4), L.Dropout(0.3)], (6,)),
    "layer norm": ([L.LayerNormalization()], (6,)),
    "convolution": ([L.Conv2D(4, 3), L.MaxPooling2D(), L.Flatten()], (9, 9, 2)),
    "average pooling": ([L.Conv1D(4, 3), L.AveragePooling1D(2)], (9, 2)),
    "separable": ([L.SeparableConv2D(4, 3), L.DepthwiseConv2D(2)], (9, 9, 2)),
    "transposed convolution": ([L.Conv2DTranspose(4, 3, strides=2)], (5, 5, 2)),
    "group norm": ([L.Conv2D(4, 3), L.GroupNormalization(2)], (9, 9, 2)),
    "lstm": ([L.LSTM(4, return_sequences=True), L.LSTM(3)], (7, 2)),
    "bidirectional gru": ([L.Bidirectional(L.GRU(4))], (7, 2)),
    "unrolled rnn": ([L.SimpleRNN(4, unroll=True)], (7, 2)),
    "time distributed": ([L.TimeDistributed(L.Dense(3))], (7, 2)),
    "reshape": ([L.Flatten(), L.Reshape((2, 7)), L.Permute((2, 1))], (7, 2)),
    "noise": ([L.Dense(4), L.GaussianNoise(0.1), L.AlphaDropout(0.1)], (6,)),
    "spectral norm": ([L.SpectralNormalization(L.Dense(4))], (6,)),
    "einsum": ([L.EinsumDense("abc,cd->abd", output_shape=(7, 3))], (7, 2)),
    "merge and split rows": (
        [Fn(lambda x: jnp.tanh(x.reshape(-1, 2)).reshape(-1, 7, 2))], (7, 2),
    ),
    "sort inside a row": ([Fn(lambda x: jnp.sort(x, axis=-1))], (6,)),
    "cumulative sum in a row": ([Fn(lambda x: jnp.cumsum(x, axis=1))], (6,)),
    "scan over steps": (
        [Fn(lambda x: jax.lax.scan(lambda c, s: (c + s, c), x[:, 0], x.T)[1].T)], (6,),
    ),
    "while loop": (
        [Fn(lambda x: jax.lax.fori_loop(0, 3, lambda i, c: jnp.sin(c), x))], (6,),
    ),
    "vmap over rows": ([Fn(jax.vmap(lambda row: row @ row * row))], (6,)),
    "take along a row": (
        [Fn(lambda x: jnp.take_along_axis(x, jnp.argsort(x, axis=1), axis=1))], (6,),
    ),
    "remat": ([Fn(jax.checkpoint(lambda x: jnp.sin(x)))], (6,)),
}  # fmt: skip


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_row_by_row_layers_train_in_the_replica_view(name):
    layers, shape = ROW_BY_ROW[name]
    assert view([L.Identity(), *layers, L.Activation("tanh")], shape) == "replica"


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


@jax.custom_vjp
def centred(x):
    return x


centred.defvjp(lambda x: (x, None), lambda _, g: (g - g.mean(axis=0),))


@jax.custom_jvp
def mixing_jvp(x):
    return x


mixing_jvp.defjvp(lambda x, dx: (x[0], dx[0] - dx[0].mean(axis=0)))


MIXED = {
    "batch mean": lambda x: x - jnp.mean(x, axis=0),
    "batch max": lambda x: x / jnp.max(x),
    "rows compared": lambda x: jax.nn.softmax(x @ x.T) @ x,
    "place in the batch": lambda x: x * jnp.arange(x.shape[0])[:, None],
    "batch size": lambda x: x / x.shape[0],
    "rows reversed": lambda x: x[::-1],
    "rows shifted": lambda x: jnp.roll(x, 1, axis=0),
    "first row": lambda x: x + x[:1],
    "sorted over rows": lambda x: jnp.sort(x, axis=0),
    "sum over rows so far": lambda x: jnp.cumsum(x, axis=0),
    "rows in the minor dimension": lambda x: x.T.reshape(-1, 6),
    "scan over rows": lambda x: jax.lax.scan(lambda c, r: (c + r, c + r), x[0], x)[1],
    "branch on the batch": lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    "loop that mixes": lambda x: jax.lax.fori_loop(
        0, 3, lambda i, c: c - c.mean(axis=0), x
    ),
    "fft over rows": lambda x: jnp.real(jnp.fft.fft(x, axis=0)),
    "filled from the batch size": lambda x: x * jnp.full((x.shape[0], 1), 1 / len(x)),
    "power of the batch size": lambda x: x ** x.shape[0],
    "branch on the batch size": lambda x: x * 2 if x.shape[0] >= 8 else x,
    "dtype by the batch size": lambda x: x.astype(
        "float16" if x.shape[0] > 2 else "float32"
    ).astype("float32"),
    "first rows of a table": lambda x: x + jnp.ones((50, 6)).at[1].set(2.0)[: len(x)],
    "one row updated": lambda x: jax.lax.dynamic_update_slice(x, x[:1] * 2, (2, 0)),
    "padded to the batch": lambda x: (
        x * jnp.pad(jnp.ones((1, 6)), [(0, len(x) - 1), (0, 0)])
    ),
    "largest rows": lambda x: jax.lax.top_k(x.T, len(x))[0].T,
    "noise of a fixed seed": lambda x: (
        x + jax.random.normal(jax.random.key(0), x.shape)
    ),
    "gradient clipped": lambda x: clipped(x),
    "gradient centred": lambda x: centred(x),
    "derivative that mixes": lambda x: mixing_jvp(x),
    "mean subtracted in vmap": lambda x: jax.vmap(
        lambda column: column - column.mean(), in_axes=1, out_axes=1
    )(x),
}


@pytest.mark.parametrize("name", MIXED)
def test_layers_that_mix_rows_train_in_the_global_view(name):
    assert view([L.Dense(6), Same(MIXED[name])]) == "global"


def mixed_loss(y_true, y_pred):
    logits = y_pred @ keras.ops.transpose(y_pred)
    return -keras.ops.diagonal(keras.ops.log_softmax(logits))


class RootOfLoss(keras.losses.MeanSquaredError):
    """Not a mean over rows any more once the root is taken."""

    def __call__(self, *args, **kwargs):
        return keras.ops.sqrt(super().__call__(*args, **kwargs))


class TwiceTheLoss(keras.losses.MeanSquaredError):
    def __call__(self, *args, **kwargs):
        return 2.0 * super().__call__(*args, **kwargs)


LOSSES = {
    "keras loss": (keras.losses.MeanSquaredError(), "replica"),
    "sum": (keras.losses.MeanSquaredError(reduction="sum"), "replica"),
    "per row": (lambda t, p: keras.ops.mean(abs(t - p), axis=-1), "replica"),
    "mean of the batch": (lambda t, p: keras.ops.mean(abs(t - p)), "global"),
    "contrastive": (mixed_loss, "global"),
    "dice": (keras.losses.Dice(), "global"),
    "root of a loss": (RootOfLoss(), "global"),
    "twice a loss": (TwiceTheLoss(), "replica"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_decide_the_view(name):
    loss, want = LOSSES[name]
    assert view([L.Dense(6, activation="sigmoid")], loss=loss) == want


@pytest.mark.parametrize(
    "layers",
    [
        [L.Dense(6, activity_regularizer="l2")],
        [L.Dense(6), Fn(jnp.tanh)],
    ],
    ids=["activity regularizer", "none"],
)
def test_losses_of_activations_train_in_the_global_view(layers):
    want = "global" if layers[0].activity_regularizer else "replica"
    assert view(layers) == want


def test_embedding_is_row_by_row():
    layers = [L.Embedding(9, 4, mask_zero=True), L.LSTM(3), L.Dense(2)]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    targets = np.zeros(8, "int32")
    assert view(layers, (5,), loss, targets, "int32") == "replica"


def test_masks_that_reach_the_loss_are_row_by_row():
    layers = [L.Embedding(9, 4, mask_zero=True), L.GRU(3, return_sequences=True)]
    targets = np.zeros((8, 5), "int32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    assert view([*layers, L.Dense(2)], (5,), loss, targets, "int32") == "replica"


class ClipsItsWeight(L.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=(6,), initializer="ones")

    def call(self, x):
        return x * clipped(self.w.value)


def test_a_gradient_defined_by_hand_on_a_weight_trains_in_the_global_view():
    assert view([L.Dense(6), ClipsItsWeight()]) == "global"


def test_looking_for_mixed_rows_draws_no_random_numbers():
    after = []
    for strategy in (None, "mirrored"):
        drawing = Same(lambda x: x * np.random.rand() if x.shape[0] else x)
        model = keras.Sequential([keras.Input((6,)), drawing])
        model.compile("sgd", "mse", distribution=strategy)
        np.random.seed(3)
        model.train_on_batch(np.ones((8, 6), "float32"), np.ones((8, 6), "float32"))
        after.append(np.random.rand())
    assert after[0] == after[1]


def test_stateful_rnn_trains_in_the_global_view():
    model = keras.Sequential(
        [keras.Input(batch_shape=(8, 5, 2)), L.LSTM(3, stateful=True)]
    )
    model.compile("sgd", "mse", distribution="mirrored")
    x, y = np.zeros((8, 5, 2), "float32"), np.zeros((8, 3), "float32")
    assert view_of_a_step(model, x, y) == "global"
