"""Slurm's job steps (srun); JAX works out the coordinator."""

from collections.abc import Mapping

from keras_mirror.cluster.resolver import Resolver
from keras_mirror.cluster.spec import Membership

_VARIABLES = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS")


class Slurm(Resolver):
    """Known by the variables that it sets; `jax.distributed` reads the rest."""

    order = 2

    @classmethod
    def membership(cls, environment: Mapping[str, str]) -> Membership | None:
        if not all(name in environment for name in _VARIABLES):
            return None
        if environment["SLURM_NTASKS"] == "1":
            return None  # one process
        return Membership(None, None, None, "Slurm")
