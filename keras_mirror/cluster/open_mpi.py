"""Open MPI (mpirun); JAX works out the coordinator."""

from collections.abc import Mapping

from keras_mirror.cluster.resolver import Resolver
from keras_mirror.cluster.spec import Membership

_VARIABLES = ("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")


class OpenMPI(Resolver):
    """Known by the variables that it sets; `jax.distributed` reads the rest."""

    order = 3

    @classmethod
    def membership(cls, environment: Mapping[str, str]) -> Membership | None:
        if not all(name in environment for name in _VARIABLES):
            return None
        if environment["OMPI_COMM_WORLD_SIZE"] == "1":
            return None  # one process
        return Membership(None, None, None, "Open MPI")
