"""KERAS_DISTRIBUTION_*, as `keras.distribution.initialize` reads them."""

from collections.abc import Mapping

from keras_mirror import errors
from keras_mirror.cluster.resolver import Resolver
from keras_mirror.cluster.spec import Membership, check_addresses, check_index

_PREFIX = "KERAS_DISTRIBUTION_"
ADDRESSES = _PREFIX + "JOB_ADDRESSES"
COUNT = _PREFIX + "NUM_PROCESSES"
INDEX = _PREFIX + "PROCESS_ID"


def _count(text: str | None, addresses: list[str]) -> int:
    if text is None:
        return len(addresses)
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise errors.ClusterSpecError(
            COUNT, "the whole", text, "It must be a whole number of at least 1."
        )
    if len(addresses) not in (1, int(text)):
        raise errors.ClusterSpecError(
            COUNT,
            "the whole",
            text,
            f"{ADDRESSES} has {len(addresses)} addresses: name the coordinator alone "
            "or every process.",
        )
    return int(text)


class KerasEnvironment(Resolver):
    """The coordinator's address, or those of all processes, and who this one is."""

    order = 1

    @classmethod
    def membership(cls, environment: Mapping[str, str]) -> Membership | None:
        text = environment.get(ADDRESSES, "").strip()
        if not text:
            if COUNT in environment and INDEX in environment:
                rule = f"It must be set where {COUNT} and {INDEX} are."
                raise errors.ClusterSpecError(ADDRESSES, "the whole", None, rule)
            return None
        parts = [part.strip() for part in text.split(",")]
        addresses = list(check_addresses(parts, "addresses", ADDRESSES))
        count = _count(environment.get(COUNT), addresses)
        if INDEX not in environment:
            raise errors.ClusterSpecError(
                INDEX, "the whole", None, f"It must be set where {ADDRESSES} is."
            )
        index = check_index(environment[INDEX], count, "the whole", INDEX)
        workers = tuple(addresses) if len(addresses) == count else ()
        return Membership(addresses[0], count, index, _PREFIX + "*", workers)
