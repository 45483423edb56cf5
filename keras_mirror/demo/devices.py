"""The devices of this machine, and which of them the demo uses."""

import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

import jax

from keras_mirror import cluster, errors
from keras_mirror.cluster import Membership
from keras_mirror.demo.settings import UsageError


@dataclass(frozen=True)
class DeviceDescription:
    """One device that JAX sees.

    Attributes:
        name: The name that strategies and `keras.distribution` use, as "gpu:0".
        platform: "cpu", "gpu" or "tpu".
        kind: The vendor's name of the model.
        memory_bytes: How much JAX may use of it, or None where it cannot say.
    """

    name: str
    platform: str
    kind: str
    memory_bytes: int | None


def describe_devices() -> list[DeviceDescription]:
    """Describes JAX's devices of the default platform, of all processes."""
    return [
        DeviceDescription(
            name=f"{device.platform}:{device.id}",
            platform=device.platform,
            kind=device.device_kind,
            memory_bytes=_memory_bytes(device),
        )
        for device in jax.devices()
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


def print_devices(*, as_json: bool) -> None:
    """Prints the devices to stdout, as a table or as one JSON object.

    Args:
        as_json: Whether a program reads it. The object has the keys "devices" and
            "cluster", the latter null without a cluster.
    """
    found = _cluster()
    devices = describe_devices()
    if as_json:
        listed = [asdict(device) for device in devices]
        print(json.dumps({"devices": listed, "cluster": found and asdict(found)}))
        return
    rows = [("name", "platform", "kind", "memory")]
    rows += [
        (device.name, device.platform, device.kind, _memory_text(device.memory_bytes))
        for device in devices
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
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
