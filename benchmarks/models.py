"""The four models of the benchmark and the data that each is trained on.

Every model ends in logits over `CLASSES` classes and starts from the same seed,
so that two contenders that build one get equal weights.
"""

from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

BATCH_SIZE = 256
CLASSES = 10
PIXELS = 784
IMAGE_SHAPE = (28, 28, 1)
SEQUENCE_LENGTH = 32
VOCABULARY = 1000
SEED = 0


@dataclass(frozen=True)
class Case:
    """One model of the benchmark.

    Args:
        name: what `--models` calls it.
        title: what the table calls it.
        input_shape: shape of one example.
        is_token_input: whether an example is made of token ids.
        is_random: whether a step draws random numbers or uses the statistics
            of its own rows, so that replicas and one device must differ.
    """

    name: str
    title: str
    input_shape: tuple[int, ...]
    is_token_input: bool = False
    is_random: bool = False

    def build(self) -> keras.Model:
        """Returns the model, unbound to any optimizer, from the fixed seed."""
        keras.utils.set_random_seed(SEED)
        inputs = keras.Input(self.input_shape, dtype=self.input_dtype)
        outputs = BODIES[self.name](inputs)
        logits = keras.layers.Dense(CLASSES)(outputs)
        return keras.Model(inputs, logits, name=self.name)

    def data(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns `steps` even batches: x and integer labels, in host memory."""
        rows = steps * BATCH_SIZE
        generator = np.random.default_rng(SEED)
        y = generator.integers(0, CLASSES, rows).astype("int32")
        if self.is_token_input:
            x = generator.integers(0, VOCABULARY, (rows, *self.input_shape))
        else:
            x = generator.normal(size=(rows, *self.input_shape))
        return x.astype(self.input_dtype), y

    @property
    def input_dtype(self) -> str:
        return "int32" if self.is_token_input else "float32"


def loss() -> keras.losses.Loss:
    """The loss of every model."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp(x: Any) -> Any:
    """Two hidden layers, no state but the weights."""
    for _ in range(2):
        x = keras.layers.Dense(256, activation="relu")(x)
    return x


def mlp_with_batch_norm(x: Any) -> Any:
    """The same with BatchNorm and dropout after each hidden layer."""
    for seed in range(2):
        x = keras.layers.Dense(256)(x)
        x = keras.layers.BatchNormalization()(x)
        x = keras.layers.Activation("relu")(x)
        x = keras.layers.Dropout(0.2, seed=seed)(x)
    return x


def cnn(x: Any) -> Any:
    """Two convolutions with pooling."""
    for filters in (8, 16):
        x = keras.layers.Conv2D(filters, 3, activation="relu")(x)
        x = keras.layers.MaxPooling2D(2)(x)
    return keras.layers.Flatten()(x)


def transformer(x: Any) -> Any:
    """Two pre-norm blocks over a learnt embedding."""
    width = 32
    x = keras.layers.Embedding(VOCABULARY, width)(x)
    for _ in range(2):
        normed = keras.layers.LayerNormalization()(x)
        attention = keras.layers.MultiHeadAttention(num_heads=2, key_dim=width // 2)
        x = x + attention(normed, normed)
        normed = keras.layers.LayerNormalization()(x)
        hidden = keras.layers.Dense(2 * width, activation="relu")(normed)
        x = x + keras.layers.Dense(width)(hidden)
    return keras.layers.GlobalAveragePooling1D()(x)


BODIES = {
    "mlp": mlp,
    "mlp_bn": mlp_with_batch_norm,
    "cnn": cnn,
    "transformer": transformer,
}
CASES = {
    case.name: case
    for case in (
        Case("mlp", "MLP", (PIXELS,)),
        Case("mlp_bn", "MLP, BatchNorm, dropout", (PIXELS,), is_random=True),
        Case("cnn", "CNN", IMAGE_SHAPE),
        Case("transformer", "transformer", (SEQUENCE_LENGTH,), is_token_input=True),
    )
}
