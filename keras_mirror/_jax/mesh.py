"""Device names, meshes over them, and the two layouts that mirroring needs."""

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

# The axes of a mesh of one process, of one of many, and of one of servers: variables
# are split over the last axis and mirrored along the first.
AXIS = "replica"
WORKER, DEVICE = "worker", "device"
MIRROR, SERVER = "mirror", "server"

Axis = str | tuple[str, ...]


def local_devices() -> list[str]:
    """Names of this process' devices of the default kind."""
    return [f"{d.platform}:{d.id}" for d in jax.local_devices()]


def all_devices() -> list[str]:
    """Names of the devices of all processes, by process."""
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    return [f"{d.platform}:{d.id}" for d in devices]


def make_mesh(
    devices: Sequence[str], *, by_worker: bool = False, num_servers: int | None = None
) -> Mesh:
    """A mesh over the named devices, in their order.

    Args:
        devices: Their names; those of one process side by side.
        by_worker: Whether its axes are the worker and the device of that worker,
            rather than the replica alone. Workers that have unequally many devices
            make no rectangle, and get the one axis.
        num_servers: Over how many devices, side by side, a variable is split; the
            axes are then the mirror and the server.
    """
    known = {f"{d.platform}:{d.id}": d for d in jax.devices()}
    chosen = [known[name] for name in devices]
    if num_servers is not None:
        return mesh_of(chosen, (-1, num_servers), (MIRROR, SERVER))
    counts = set(Counter(device.process_index for device in chosen).values())
    if by_worker and len(counts) == 1:
        return mesh_of(chosen, (-1, counts.pop()), (WORKER, DEVICE))
    return mesh_of(chosen, (-1,), (AXIS,))


def mesh_of(devices: list[Any], shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    """A mesh of this shape and these axes."""
    # `jax.make_mesh` makes Explicit axes by default, and shard_map refuses ordinary
    # arrays on those.
    kinds = (AxisType.Auto,) * len(names)
    return Mesh(np.array(devices, dtype=object).reshape(shape), names, axis_types=kinds)


@functools.cache
def alone(name: str) -> Mesh:
    """A mesh of one device, which may be of another kind than the default."""
    platform, _, number = name.partition(":")
    device = next(d for d in jax.local_devices(backend=platform) if d.id == int(number))
    return mesh_of([device], (1,), (AXIS,))


def host_devices() -> list[str]:
    """Names of the devices that compute in host memory; none where JAX has none."""
    try:
        return [f"{d.platform}:{d.id}" for d in jax.local_devices(backend="cpu")]
    except RuntimeError:
        return []


def in_host_memory() -> NamedSharding:
    """An array of this process alone, in the memory of its host where JAX has that."""
    return replicated(alone((host_devices() or local_devices())[0]))


def replica_axis(mesh: Mesh) -> Axis:
    """What collectives over all replicas name: the one axis, or both."""
    return mesh.axis_names[0] if len(mesh.axis_names) == 1 else mesh.axis_names


def is_ours(sharding: Any) -> bool:
    """Whether a layout is over a mesh that a strategy has made."""
    return isinstance(sharding, NamedSharding) and sharding.mesh.axis_names in (
        (AXIS,),
        (WORKER, DEVICE),
        (MIRROR, SERVER),
    )


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
    if SERVER in mesh.axis_names and not servers_span_processes(mesh):
        return mesh_of(own, (-1, mesh.shape[SERVER]), (MIRROR, SERVER))
    return mesh_of(own, (-1,), (AXIS,))


@functools.cache
def servers_span_processes(mesh: Mesh) -> bool:
    """Whether the parts of one variable lie in several processes."""
    if SERVER not in mesh.axis_names:
        return False
    return any(len({d.process_index for d in group}) > 1 for group in mesh.devices)


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


def from_own_rows(own: np.ndarray, mesh: Mesh, rows: int) -> jax.Array:
    """An array of `rows` rows over all processes; each brings those it computes."""
    dtype = jax.dtypes.canonicalize_dtype(own.dtype)
    return jax.make_array_from_process_local_data(
        by_rows(mesh), own.astype(dtype, copy=False), (rows, *own.shape[1:])
    )


@functools.cache
def by_rows(mesh: Mesh) -> NamedSharding:
    """The first axis divided over the devices."""
    return NamedSharding(mesh, PartitionSpec(replica_axis(mesh)))
