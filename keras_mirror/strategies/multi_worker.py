"""Many processes, the variables mirrored on every device of each."""

import warnings
from collections.abc import Mapping
from typing import Any

from keras_mirror import errors
from keras_mirror.cluster import ClusterSpec
from keras_mirror.strategies.base import View
from keras_mirror.strategies.workers import AutoShard, WorkersStrategy


class MultiWorkerMirroredStrategy(WorkersStrategy):
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
        super().__init__(
            cluster,
            auto_shard=auto_shard,
            view=view,
            synchronize_batch_norm=synchronize_batch_norm,
            timeout_seconds=timeout_seconds,
            heartbeat_seconds=heartbeat_seconds,
            runtime_options=runtime_options,
        )
        if self.num_workers == 1:
            warnings.warn(errors.AloneWarning(), stacklevel=2)
