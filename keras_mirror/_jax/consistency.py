"""Whether every replica of every worker holds the same variables."""

import hashlib
from typing import Any

import jax
import numpy as np

from keras_mirror import errors
from keras_mirror._jax import compat, processes


def _digest(array: Any) -> str:
    value = np.ascontiguousarray(np.asarray(array))
    return hashlib.blake2b(value.tobytes(), digest_size=8).hexdigest()


def _digests(variable: Any) -> list[str]:
    """One a copy that this process has of the variable, whole or in parts."""
    value = getattr(variable, "_value", None)
    if not isinstance(value, jax.Array):
        return []
    # The copies of each part, in the order of devices.
    parts: dict[str, list[str]] = {}
    for shard in value.addressable_shards:
        parts.setdefault(str(shard.index), []).append(_digest(shard.data))
    copies = zip(*parts.values(), strict=True)
    return [digests[0] if len(parts) == 1 else "".join(digests) for digests in copies]


def check(variables: list[Any]) -> None:
    """Compares checksums over replicas and workers.

    Raises:
        InconsistentVariableError: On every worker, for the first variable that
            differs.
    """
    own = [_digests(variable) for variable in variables]
    told = [own]
    if compat.process_count() > 1:
        summary = hashlib.blake2b(repr(own).encode(), digest_size=8).hexdigest()
        several = any(len(set(found)) > 1 for found in own)
        summaries = processes.exchange([summary, several], "the check of variables")
        if all(found == [summaries[0][0], False] for found in summaries):
            return
        told = processes.exchange(own, "the checksums of variables")
    for place, variable in enumerate(variables):
        different = _different([worker[place] for worker in told])
        if different:
            raise errors.InconsistentVariableError(variable.path, different)


def _different(found: list[list[str]]) -> list[str]:
    if not found[0]:
        return []
    first = found[0][0]
    several = len(found) > 1
    return [
        f"worker {i}, replica {k}" if several else f"replica {k}"
        for i, digests in enumerate(found)
        for k, digest in enumerate(digests)
        if digest != first
    ]
