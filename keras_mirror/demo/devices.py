"""The devices of this machine, and which of them the demo uses."""

import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

import jax

from keras_mirror import cluster, errors
from keras_mirror.cluster import Membership
from keras_mirror.demo.settings import DemoError, UsageError

_JOIN_SECONDS = 60


@dataclass(frozen=True)
class DeviceDescription:
    """One device that JAX sees.

    Attributes:
        name: The name that strategies and `keras.distribution` use, as "gpu:0".
        platform: "cpu", "gpu" or "tpu".
        kind: The vendor's name of the model.
        memory_bytes: How much JAX may use of it, or None where it cannot say.
        worker: The process that has it, among those that have joined.
    """

    name: str
    platform: str
    kind: str
    memory_bytes: int | None
    worker: int


def describe_devices() -> list[DeviceDescription]:
    """Describes JAX's devices of the default platform, of all processes."""
    return [
        DeviceDescription(
            name=f"{device.platform}:{device.id}",
            platform=device.platform,
            kind=device.device_kind,
            memory_bytes=_memory_bytes(device),
            worker=device.process_index,
        )
        for device in sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    ]


def _memory_bytes(device: Any) -> int | None:
    # CPU devices have no statistics, and devices of other processes refuse to
    # be asked.
    try:
        statistics = device.memory_stats()
    except Exception:
        return None
    return (statistics or {}).get("bytes_limit")


def choose_devices(available: list[str], count: int | None) -> list[str]:
    """The devices that a run uses.

    Args:
        available: Names of all devices.
        count: How many; None means all.

    Returns:
        The first `count` names.

    Raises:
        UsageError: There are fewer.
    """
    if count is None:
        return available
    if count > len(available):
        platform = available[0].partition(":")[0]
        hint = (
            "Raise the number that XLA_FLAGS or JAX_NUM_CPU_DEVICES sets, or unset it"
            if platform == "cpu"
            else "Set JAX_PLATFORMS=cpu for virtual CPU devices"
        )
        raise UsageError(
            f"--devices must be at most {len(available)}, the number of {platform} "
            f"devices that JAX has here. Received: {count}. {hint}."
        )
    return available[:count]


def print_devices(*, as_json: bool, join: bool = False) -> None:
    """Prints the devices to stdout, as a table or as one JSON object.

    Args:
        as_json: Whether a program reads it. The object has the keys "devices" and
            "cluster", the latter null without a cluster.
        join: Whether to meet the other workers first and print theirs as well.

    Raises:
        DemoError: The workers did not meet.
    """
    found = _cluster()
    if join:
        _join(found)
    devices = describe_devices()
    if as_json:
        listed = [asdict(device) for device in devices]
        print(json.dumps({"devices": listed, "cluster": found and asdict(found)}))
        return
    rows = [("name", "platform", "kind", "memory", "worker")]
    rows += [
        (d.name, d.platform, d.kind, _memory_text(d.memory_bytes), str(d.worker))
        for d in devices
    ]
    if not join:
        rows = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip(), file=sys.stdout)
    if found is not None:
        print(_cluster_text(found))


def _cluster() -> Membership | None:
    """What the environment says of other workers; none of them is asked."""
    try:
        return cluster.find(os.environ)
    except errors.ClusterSpecError as error:
        raise UsageError(str(error)) from error


def _join(found: Membership | None) -> None:
    if found is None:
        raise UsageError(
            "--join needs a cluster to join. Received: an environment without one. Set "
            "TF_CONFIG or KERAS_DISTRIBUTION_*, or start it with a scheduler."
        )
    # Imported here because it takes Keras, which the list alone does not need.
    from keras_mirror.strategies import MultiWorkerMirroredStrategy

    try:
        MultiWorkerMirroredStrategy(timeout_seconds=_JOIN_SECONDS)
    except errors.UnsupportedBackendError as error:
        raise UsageError(str(error)) from error
    except errors.ClusterStartError as error:
        raise DemoError(str(error)) from error


def _cluster_text(found: Membership) -> str:
    if found.coordinator is None:
        return f"cluster: of {found.source}; jax.distributed finds the workers"
    lines = [
        f"cluster: {found.num_workers} workers, from {found.source}; this is worker "
        f"{found.index}; they meet at {found.coordinator}"
    ]
    lines += [f"  worker {i}: {address}" for i, address in enumerate(found.workers)]
    return "\n".join(lines)


def _memory_text(memory_bytes: int | None) -> str:
    return "unknown" if memory_bytes is None else f"{memory_bytes / 2**30:.1f} GiB"
