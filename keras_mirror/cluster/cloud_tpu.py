"""Cloud TPU pods; JAX asks the machine's metadata."""

from collections.abc import Mapping

from keras_mirror.cluster.resolver import Scheduler


class CloudTPU(Scheduler):
    """A host of a slice."""

    order = 5
    name = "Cloud TPU"
    variables = ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES")

    @classmethod
    def is_alone(cls, environment: Mapping[str, str]) -> bool:
        return "," not in environment["TPU_WORKER_HOSTNAMES"]
