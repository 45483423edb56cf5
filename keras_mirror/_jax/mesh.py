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


def all_devices() -> list[str]:
    """Names of the devices of all processes, by process."""
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    return [f"{d.platform}:{d.id}" for d in devices]


def make_mesh(devices: Sequence[str]) -> Mesh:
    """A mesh with one axis over the named devices.

    The axis is Auto: `jax.make_mesh` makes Explicit axes by default, and shard_map
    refuses ordinary arrays on those.
    """
    known = {f"{d.platform}:{d.id}": d for d in jax.devices()}
    chosen = np.array([known[name] for name in devices], dtype=object)
    return Mesh(chosen, (AXIS,), axis_types=(AxisType.Auto,))


@functools.cache
def at_home(mesh: Mesh) -> Mesh:
    """The part of a mesh that this process has; all of it where it has all.

    Between steps variables lie here, so that nothing but a step ever needs another
    process.
    """
    index = jax.process_index()
    own = [d for d in mesh.devices.flat if d.process_index == index]
    if len(own) == mesh.size:
        return mesh
    return Mesh(np.array(own, dtype=object), (AXIS,), axis_types=(AxisType.Auto,))


def spans_processes(mesh: Mesh) -> bool:
    """Whether other processes have a part of the mesh."""
    return at_home(mesh) is not mesh


@functools.cache
def replicated(mesh: Mesh) -> NamedSharding:
    """A full copy on each device."""
    return NamedSharding(mesh, PartitionSpec())


@functools.cache
def replicated_at_home(mesh: Mesh) -> NamedSharding:
    """A full copy on each device that this process has of the mesh."""
    return replicated(at_home(mesh))


@functools.cache
def by_rows(mesh: Mesh) -> NamedSharding:
    """The first axis divided over the devices."""
    return NamedSharding(mesh, PartitionSpec(AXIS))
