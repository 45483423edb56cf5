"""A worker whose program initializes JAX's runtime itself, before the strategy."""

import json
import os
import sys

import cluster
import jax
import training

import keras_mirror as km

config = json.loads(os.environ["TF_CONFIG"])
hosts, me = config["cluster"]["worker"], config["task"]["index"]


def said(config):
    """The error of a strategy under another TF_CONFIG."""
    os.environ["TF_CONFIG"] = json.dumps(config)
    try:
        km.MultiWorkerMirroredStrategy()
    except km.errors.ClusterStartError as error:
        return str(error)
    return None


if sys.argv[2] == "adopted":
    jax.distributed.initialize(hosts[0], len(hosts), me)
    other = {"type": "worker", "index": 1 - me}
    found = {"other index": said(config | {"task": other})}
    more = {"worker": [*hosts, "127.0.0.1:1"]}
    found["other count"] = said(config | {"cluster": more})
    elsewhere = km.ClusterSpec(["127.0.0.1:1", "127.0.0.1:2"], str(me))
    assert elsewhere.index == me
    try:
        km.MultiWorkerMirroredStrategy(elsewhere)
    except km.errors.ClusterStartError as error:
        found["other chief"] = str(error)
    options = {"shutdown_timeout_seconds": 5}
    try:
        km.MultiWorkerMirroredStrategy(runtime_options=options)
    except km.errors.RuntimeOptionError as error:
        found["option"] = str(error)
    for name in ("with TF_CONFIG", "without"):
        os.environ.pop("TF_CONFIG")
        if name == "with TF_CONFIG":
            os.environ["TF_CONFIG"] = json.dumps(config)
        strategy = km.MultiWorkerMirroredStrategy()
        assert (strategy.num_workers, strategy.worker_index) == (2, me)
        km.set_strategy(strategy)
        found[name] = training.run("data: arrays")
else:
    jax.numpy.zeros(3)
    found = {"used": said(config)}
cluster.save(sys.argv[1], me, found)
