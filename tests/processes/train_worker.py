"""A worker: runs every program under MultiWorkerMirroredStrategy."""

import sys
import traceback

import cluster
import parts
import training

import keras_mirror as km

strategy = km.MultiWorkerMirroredStrategy(heartbeat_seconds=15)
km.set_strategy(strategy)
found = {}
for name in sys.argv[2:] or training.PROGRAMS:
    try:
        found[name] = training.run(name)
    except Exception:
        found[name] = traceback.format_exc()
        print(name, found[name], flush=True)
if not sys.argv[2:]:
    found |= parts.on_worker(strategy.worker_index)
cluster.save(sys.argv[1], strategy.worker_index, found)
