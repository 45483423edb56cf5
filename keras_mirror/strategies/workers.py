"""What the strategies of many processes share: meeting, rows, and options."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from keras_mirror import _engine, cluster, errors
from keras_mirror.cluster import ClusterSpec
from keras_mirror.strategies.base import Strategy, View, check_devices, check_view
from keras_mirror.strategies.mirrored import check_batch_norm_option

AUTO_SHARD = ("auto", "data", "file", "off")
AutoShard = Literal["auto", "data", "file", "off"]


class WorkersStrategy(Strategy):
    """A strategy of all devices of all processes of a cluster.

    Args:
        cluster, auto_shard, view, synchronize_batch_norm, timeout_seconds,
        heartbeat_seconds, runtime_options: see `MultiWorkerMirroredStrategy`.
        devices: Names of this process' devices; None for all of the cluster.
        num_servers: Gives over how many of all devices variables are split; None
            where they are mirrored.
    """

    def __init__(
        self,
        cluster: ClusterSpec | None,
        *,
        auto_shard: AutoShard,
        view: View,
        synchronize_batch_norm: bool,
        timeout_seconds: int,
        heartbeat_seconds: int,
        runtime_options: Mapping[str, Any] | None,
        devices: Sequence[object] | None = None,
        num_servers: Callable[[int], int] | None = None,
    ):
        check_view(view)
        check_batch_norm_option(synchronize_batch_norm, view)
        _check_seconds("timeout_seconds", timeout_seconds)
        _check_seconds("heartbeat_seconds", heartbeat_seconds)
        if auto_shard not in AUTO_SHARD:
            raise errors.OptionValueError("auto_shard", auto_shard, AUTO_SHARD)
        options = _checked_options(runtime_options)
        membership = _membership(cluster)
        engine = _engine.load()
        self._num_workers, self._index = engine.join(
            membership,
            timeout_seconds=timeout_seconds,
            heartbeat_seconds=heartbeat_seconds,
            runtime_options=options,
        )
        available = engine.all_devices()
        if devices is not None and self._num_workers > 1:
            raise errors.IncompatibleOptionsError(
                f"devices={devices!r}",
                f"{self._num_workers} workers",
                "Many workers train on all devices that they have.",
                "Leave `devices` out; give each worker what it is to use.",
            )
        chosen = check_devices(devices, available)
        super().__init__(
            chosen,
            view=view,
            available=available,
            by_worker=num_servers is None,
            num_servers=None if num_servers is None else num_servers(len(chosen)),
        )
        self._cluster = cluster
        self._auto_shard: AutoShard = auto_shard
        self._synchronize_batch_norm = synchronize_batch_norm
        self._timeout_seconds = timeout_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._runtime_options = options

    @property
    def auto_shard(self) -> AutoShard:
        """What each worker's batches are."""
        return self._auto_shard

    @property
    def num_workers(self) -> int:
        """How many processes train together."""
        return self._num_workers

    @property
    def worker_index(self) -> int:
        """Which of them this is; 0 is the chief."""
        return self._index

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that writes files."""
        return self._index == 0

    @property
    def synchronize_batch_norm(self) -> bool:
        """Whether BatchNormalization sees the whole batch."""
        return self._synchronize_batch_norm

    def get_config(self) -> dict[str, Any]:
        """The arguments that make an equal strategy."""
        return {
            "cluster": self._cluster,
            "auto_shard": self.auto_shard,
            "view": self.view,
            "synchronize_batch_norm": self.synchronize_batch_norm,
            "timeout_seconds": self._timeout_seconds,
            "heartbeat_seconds": self._heartbeat_seconds,
            "runtime_options": self._runtime_options,
        }


def _membership(spec: object) -> cluster.Membership | None:
    if spec is None:
        return cluster.find(os.environ)
    if not isinstance(spec, ClusterSpec):
        raise errors.ClusterSpecError(
            "The argument `cluster`",
            "the whole",
            spec,
            "It must be a ClusterSpec(workers=[...], index=...) or None.",
        )
    return spec.membership()


def _checked_options(options: Any) -> dict[str, Any]:
    if options is None:
        return {}
    is_one = isinstance(options, Mapping)
    if not is_one or not all(isinstance(name, str) for name in options):
        kind = "a dict of keyword arguments, or None"
        raise errors.OptionKindError("runtime_options", options, kind)
    return dict(options)


def _check_seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise errors.OptionKindError(name, value, "a whole number of seconds")
