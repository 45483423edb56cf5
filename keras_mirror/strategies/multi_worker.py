"""Many processes, the variables mirrored on every device of each."""

import os
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from keras_mirror import _engine, cluster, errors
from keras_mirror.cluster import ClusterSpec
from keras_mirror.strategies.base import Strategy, View, check_view
from keras_mirror.strategies.mirrored import check_batch_norm_option

AUTO_SHARD = ("auto", "data", "file", "off")
AutoShard = Literal["auto", "data", "file", "off"]


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on all devices of all processes of a cluster.

    Every process runs the same program. `batch_size`, and the batch of any data set,
    is the global batch: each worker computes its own rows of it, so that W workers
    give the numbers of one device.

    Args:
        cluster: The workers and which of them this process is. None asks, in this
            order, TF_CONFIG, KERAS_DISTRIBUTION_*, Slurm, Open MPI, Kubernetes and
            Cloud TPU. Without any of them it runs with one worker and says so.
        auto_shard: "auto" or "data": every worker has the same data, in batches of
            the global size, and computes its rows. "file": the files that a tf.data
            dataset reads are shared out between the workers, its batch stays the
            global one. "auto" does not choose it, since the rows then come in another
            order than on one device, and so the numbers differ. "off": what each
            worker brings is its part of the global batch, of any number of rows.
            With "file" and "off" `predict` returns a worker the rows that it read.
        view: As for `MirroredStrategy`.
        synchronize_batch_norm: As for `MirroredStrategy`.
        timeout_seconds: How long to wait for the other workers at the start.
        heartbeat_seconds: After how long without a sign of life a worker counts as
            dead, and the others end.
        runtime_options: Further keyword arguments of `jax.distributed.initialize`,
            where the installed JAX has them: mTLS (`mtls_cert_file`,
            `mtls_key_file`, `mtls_ca_file`; JAX 0.12 and newer), or
            `coordinator_bind_address`.

    Raises:
        ClusterSpecError: The cluster is described wrongly; the field is named.
        ClusterStartError: JAX was used before, or the workers did not meet.
        RuntimeOptionError: The installed JAX has no such option, or its runtime is
            there already, without it.

    Cost: one all-reduce of the gradients per step, and one exchange of a few bytes
    between the hosts.

    Example:

    ```python
    strategy = km.MultiWorkerMirroredStrategy()  # TF_CONFIG is set
    with strategy.scope():
        model = build()
        model.compile("adam", "mse")
    model.fit(dataset)  # batches of the global batch size
    ```
    """

    name = "multi_worker_mirrored"

    def __init__(
        self,
        cluster: ClusterSpec | None = None,
        *,
        auto_shard: AutoShard = "auto",
        view: View = "auto",
        synchronize_batch_norm: bool = False,
        timeout_seconds: int = 300,
        heartbeat_seconds: int = 30,
        runtime_options: Mapping[str, Any] | None = None,
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
        if self._num_workers == 1:
            warnings.warn(errors.AloneWarning(), stacklevel=2)
        devices = engine.all_devices()
        super().__init__(devices, view=view, available=devices, by_worker=True)
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
        raise errors.OptionValueError(
            "runtime_options", options, ("a dict of keyword arguments", None)
        )
    return dict(options)


def _check_seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise errors.OptionValueError(name, value, ("a whole number of seconds",))
