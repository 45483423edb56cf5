"""Variables split over devices, of one worker or of all: the numbers of one device."""

import cluster
import keras
import pytest
import server_worker_names
import training
from parity import assert_same

import keras_mirror as km


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module")
def found(folder):
    return cluster.results("server_worker.py", folder, workers=2, devices=2)


@pytest.mark.parametrize("kind", server_worker_names.KINDS, ids=" ".join)
@pytest.mark.parametrize("name", server_worker_names.NAMES)
def test_two_workers_match_one_device(found, name, kind):
    assert_same("worker", found[1][kind, name], found[0][kind, name], 0)
    assert_same("workers", found[0][kind, name], training.run(name))


@pytest.mark.parametrize("kind", server_worker_names.KINDS, ids=" ".join)
def test_variables_are_split_and_files_are_whole(found, folder, kind):
    servers, shard = kind
    count = server_worker_names.SERVERS[servers]
    loaded = keras.models.load_model(folder / f"{' '.join(kind)}.keras")
    for worker in found:
        made = worker[kind]
        assert made["parts"] == [count if shard == "parameters" else 1, count]
        assert_same("saved", loaded.get_weights(), made["weights"], 0)
        assert_same("called", made["predicted"], loaded(training.X))
    model = training.compiled(training.mlp())
    assert km.ShardedCheckpoint(folder / " ".join(kind)).restore(model) == 4
    assert_same("checkpoint", model.get_weights(), loaded.get_weights(), 0)
