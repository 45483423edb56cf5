"""The sources that are asked in turn; the first that knows anything counts."""

from collections.abc import Mapping

from keras_mirror.cluster.spec import Membership


class Resolver:
    """One way to find out who this process is. Subclasses register themselves.

    Attributes:
        order: The lower is asked first; None for a class that is never asked.
    """

    order: int | None = None
    known: "list[type[Resolver]]" = []

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.order is not None:
            Resolver.known.append(cls)
            Resolver.known.sort(key=lambda known: known.order or 0)

    @classmethod
    def membership(cls, environment: Mapping[str, str]) -> Membership | None:
        """This process' place, or None where this source says nothing.

        Raises:
            ClusterSpecError: It says something that cannot be.
        """
        raise NotImplementedError


class Scheduler(Resolver):
    """One that JAX can ask itself; known by the variables that it sets.

    Attributes:
        name: What people call it.
        variables: They must all be there.
    """

    name = ""
    variables: tuple[str, ...] = ()

    @classmethod
    def membership(cls, environment: Mapping[str, str]) -> Membership | None:
        """That the scheduler is there; None also for a process that is alone."""
        if not all(variable in environment for variable in cls.variables):
            return None
        if cls.is_alone(environment):
            return None
        return Membership(None, None, None, cls.name)

    @classmethod
    def is_alone(cls, environment: Mapping[str, str]) -> bool:
        """Whether the scheduler has started this process alone."""
        return False


def find(environment: Mapping[str, str]) -> Membership | None:
    """What the environment says of this process' place; None where nothing does.

    Args:
        environment: Environment variables.

    Raises:
        ClusterSpecError: A source is there and wrong.
    """
    # Imported here so that they register: one file a source.
    from keras_mirror.cluster import (  # noqa: F401
        cloud_tpu,
        keras_environment,
        kubernetes,
        open_mpi,
        slurm,
        tf_config,
    )

    for resolver in Resolver.known:
        found = resolver.membership(environment)
        if found is not None:
            return found
    return None
