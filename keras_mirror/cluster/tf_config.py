"""TF_CONFIG, as tf.distribute reads it."""

import json
from collections.abc import Mapping
from typing import Any

from keras_mirror import errors
from keras_mirror.cluster.resolver import Resolver
from keras_mirror.cluster.spec import Membership, check_addresses, check_index

VARIABLE = "TF_CONFIG"
_TRAINING = ("chief", "worker")
_ROLES = (*_TRAINING, "ps", "evaluator")


def _error(field: str, value: object, rule: str) -> errors.ClusterSpecError:
    return errors.ClusterSpecError(VARIABLE, field, value, rule)


def _parse(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise _error("the whole", text, f"It must be JSON ({error}).") from error
    if not isinstance(found, dict):
        raise _error("the whole", text, "It must be a JSON object.")
    return found


def _addresses(cluster: object) -> dict[str, tuple[str, ...]]:
    if not isinstance(cluster, dict):
        raise _error("cluster", cluster, "It must map roles to lists of addresses.")
    for role in cluster:
        if role not in _ROLES:
            raise _error(f"cluster.{role}", role, f"Roles are {', '.join(_ROLES)}.")
    found = {
        role: check_addresses(cluster[role], f"cluster.{role}", VARIABLE)
        for role in _ROLES
        if role in cluster
    }
    if len(found.get("chief", ())) > 1:
        raise _error("cluster.chief", cluster["chief"], "There is one chief.")
    seen: set[str] = set()
    for role, addresses in found.items():
        if seen & set(addresses):
            rule = "Each process needs its own address."
            raise _error(f"cluster.{role}", sorted(seen & set(addresses)), rule)
        seen |= set(addresses)
    return found


def _task(task: object, cluster: dict[str, tuple[str, ...]]) -> tuple[str, int]:
    if not isinstance(task, dict):
        rule = 'It must be an object such as {"type": "worker", "index": 0}.'
        raise _error("task", task, rule)
    for key in ("type", "index"):
        if key not in task:
            raise _error(f"task.{key}", None, "It must be there.")
    role = task["type"]
    if role not in _TRAINING:
        rule = (
            "This process must be the chief or a worker to train here. A parameter "
            "server or an evaluator takes no part in mirrored training."
            if role in _ROLES
            else f"Roles are {', '.join(_ROLES)}."
        )
        raise _error("task.type", role, rule)
    if role not in cluster:
        raise _error("task.type", role, f"`cluster` has no {role!r}.")
    index = check_index(task["index"], len(cluster[role]), "task.index", VARIABLE)
    return role, index


class TFConfig(Resolver):
    """{"cluster": {"worker": [...]}, "task": {"type": "worker", "index": 0}}."""

    order = 0

    @classmethod
    def membership(cls, environment: Mapping[str, str]) -> Membership | None:
        text = environment.get(VARIABLE, "").strip()
        if not text:
            return None
        config = _parse(text)
        if not config.get("cluster"):
            return None  # as TF has it: one machine
        cluster = _addresses(config["cluster"])
        role, index = _task(config.get("task"), cluster)
        chief = cluster.get("chief", ())
        workers = chief + cluster.get("worker", ())
        if role == "worker":
            index += len(chief)
        return Membership(workers[0], len(workers), index, VARIABLE, workers)
