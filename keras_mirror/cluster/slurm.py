"""Slurm's job steps (srun); JAX works out the coordinator."""

from collections.abc import Mapping

from keras_mirror.cluster.resolver import Scheduler


class Slurm(Scheduler):
    """A task of a step."""

    order = 2
    name = "Slurm"
    variables = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS")

    @classmethod
    def is_alone(cls, environment: Mapping[str, str]) -> bool:
        return environment["SLURM_NTASKS"] == "1"
