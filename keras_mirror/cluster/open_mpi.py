"""Open MPI (mpirun); JAX works out the coordinator."""

from collections.abc import Mapping

from keras_mirror.cluster.resolver import Scheduler


class OpenMPI(Scheduler):
    """A rank of its world."""

    order = 3
    name = "Open MPI"
    variables = (
        "OMPI_MCA_orte_hnp_uri",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
    )

    @classmethod
    def is_alone(cls, environment: Mapping[str, str]) -> bool:
        return environment["OMPI_COMM_WORLD_SIZE"] == "1"
