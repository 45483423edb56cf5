"""Cloud TPU pods; JAX asks the machine's metadata."""

from collections.abc import Mapping

from keras_mirror.cluster.resolver import Resolver
from keras_mirror.cluster.spec import Membership

_VARIABLES = ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES")


class CloudTPU(Resolver):
    """Known by the variables that it sets; `jax.distributed` reads the rest."""

    order = 5

    @classmethod
    def membership(cls, environment: Mapping[str, str]) -> Membership | None:
        if not all(name in environment for name in _VARIABLES):
            return None
        if "," not in environment["TPU_WORKER_HOSTNAMES"]:
            return None  # one machine
        return Membership(None, None, None, "Cloud TPU")
