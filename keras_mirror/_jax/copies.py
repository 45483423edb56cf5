"""One array over several processes, and the arrays that each of them has of it."""

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from keras_mirror._jax import turns
from keras_mirror._jax.mesh import at_home, replicated


def _same_copies(value: jax.Array, mesh: Mesh) -> jax.Array:
    """This process' part of an array as that of one over another mesh; no copy."""
    sharding = replicated(mesh)
    if not value.sharding.is_fully_replicated:
        sharding = NamedSharding(mesh, value.sharding.spec)  # pyright: ignore
    copies = [shard.data for shard in value.addressable_shards]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, copies)


def lifted(value: jax.Array, mesh: Mesh) -> jax.Array:
    """An array that this process has, as its part of one over the whole mesh."""
    return _same_copies(value, mesh)


def lowered(value: jax.Array, mesh: Mesh) -> jax.Array:
    """Undoes `lifted`."""
    return _same_copies(value, at_home(mesh))


@functools.cache
def _replicating(mesh: Mesh) -> Any:
    return jax.jit(lambda values: values, out_shardings=replicated(mesh))


def replicate(values: Any, mesh: Mesh) -> Any:
    """A nest of arrays of any layout over `mesh`, each whole on every device."""
    return turns.take(_replicating(mesh), values)


def from_whole(value: Any, sharding: NamedSharding) -> jax.Array:
    """An array over all processes, each of which has it whole and keeps its part."""
    host = np.asarray(value)
    dtype = jax.dtypes.canonicalize_dtype(host.dtype)

    def part(index: Any) -> np.ndarray:
        # A copy: a step takes the memory of what it is given.
        return np.array(host[index], dtype)

    return jax.make_array_from_callback(host.shape, sharding, part)


def whole_here(value: jax.Array, place: NamedSharding) -> jax.Array:
    """The value of an array over all processes, at `place`, which this one has.

    Every process must come here where the array is split.
    """
    if not value.sharding.is_fully_replicated:
        value = replicate(value, value.sharding.mesh)  # pyright: ignore
    own = np.asarray(value.addressable_data(0))
    return jax.device_put(np.array(own), place)
