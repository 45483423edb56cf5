"""Device names, meshes over them, and the two layouts that mirroring needs."""

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXIS = "replica"


def local_devices() -> list[str]:
    """Names of this process' devices of the default kind."""
    return [f"{d.platform}:{d.id}" for d in jax.local_devices()]


def make_mesh(devices: Sequence[str]) -> Mesh:
    """A mesh with one axis over the named devices.

    The axis is Auto: `jax.make_mesh` makes Explicit axes by default, and shard_map
    refuses ordinary arrays on those.
    """
    known = {f"{d.platform}:{d.id}": d for d in jax.local_devices()}
    chosen = np.array([known[name] for name in devices], dtype=object)
    return Mesh(chosen, (AXIS,), axis_types=(AxisType.Auto,))


@functools.cache
def replicated(mesh: Mesh) -> NamedSharding:
    """A full copy on each device."""
    return NamedSharding(mesh, PartitionSpec())


@functools.cache
def by_rows(mesh: Mesh) -> NamedSharding:
    """The first axis divided over the devices."""
    return NamedSharding(mesh, PartitionSpec(AXIS))
