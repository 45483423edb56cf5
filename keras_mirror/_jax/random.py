"""Random numbers in the replica view: other masks on each replica, one state.

A `keras.random.SeedGenerator` keeps u32[2]: the seed and a counter. The replica's
index is folded into the seed on entry; the seed that leaves is the original one
with the counter that the step advanced, equal on all replicas.
"""

import jax
import jax.numpy as jnp
import numpy as np

from keras_mirror._seeds import STRIDE

_STRIDE = np.uint32(STRIDE)


def _offset(replica_id: jax.Array) -> jax.Array:
    shift = replica_id.astype("uint32") * _STRIDE
    return jnp.stack([shift, jnp.uint32(0)])


def fold_in(seed: jax.Array, replica_id: jax.Array) -> jax.Array:
    """u32[2] -> u32[2]: the seed of this replica. Replica 0 keeps the original."""
    return seed + _offset(replica_id)


def fold_out(seed: jax.Array, replica_id: jax.Array) -> jax.Array:
    """Undoes `fold_in` and leaves the counter as the step advanced it."""
    return seed - _offset(replica_id)
