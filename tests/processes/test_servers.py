"""Variables split over the devices of each worker: the numbers of one device."""

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


@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
@pytest.mark.parametrize("name", server_worker_names.NAMES)
def test_two_workers_match_one_device(found, name, shard):
    key = f"{shard} {name}"
    assert_same("worker", found[1][key], found[0][key], 0)
    assert_same("workers", found[0][key], training.run(name))


@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_variables_are_split_and_files_are_whole(found, folder, shard):
    assert found[0][f"{shard} split"] == [2 if shard == "parameters" else 1, 2]
    loaded = keras.models.load_model(folder / f"{shard}.keras")
    for worker in found:
        assert_same("saved", loaded.get_weights(), worker[f"{shard} saved"], 0)
    model = training.compiled(training.mlp())
    assert km.ShardedCheckpoint(folder / shard).restore(model) == 4
    assert_same("checkpoint", model.get_weights(), loaded.get_weights(), 0)
