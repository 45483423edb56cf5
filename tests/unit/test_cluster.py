"""Who am I: every source, and every mistake named by its field."""

import json

import jax
import pytest

import keras_mirror as km
from keras_mirror import cluster, errors
from keras_mirror._jax import compat

HOSTS = ["10.0.0.1:9000", "10.0.0.2:9000", "10.0.0.3:9000"]


def tf_config(hosts=HOSTS, index=1, role="worker", **more):
    config = {"cluster": {"worker": hosts}, "task": {"type": role, "index": index}}
    return {"TF_CONFIG": json.dumps(config | more)}


def found(environment):
    place = cluster.find(environment)
    assert place is not None
    return place.coordinator, place.num_workers, place.index, place.source


def test_nothing_is_found_in_an_empty_environment():
    assert cluster.find({}) is None
    assert cluster.find({"TF_CONFIG": ""}) is None
    assert cluster.find({"TF_CONFIG": "{}"}) is None
    assert cluster.find(tf_config(cluster={})) is None


def test_tf_config_of_workers():
    assert found(tf_config()) == (HOSTS[0], 3, 1, "TF_CONFIG")


def test_the_chief_of_tf_config_comes_first():
    roles = {"chief": ["10.0.0.9:1"], "worker": HOSTS, "evaluator": ["10.0.0.8:1"]}
    chief = tf_config(cluster=roles, task={"type": "chief", "index": 0})
    assert found(chief)[:3] == ("10.0.0.9:1", 4, 0)
    assert found(tf_config(cluster=roles, index=2))[:3] == ("10.0.0.9:1", 4, 3)


def test_keras_own_variables():
    environment = {
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": ", ".join(HOSTS),
        "KERAS_DISTRIBUTION_PROCESS_ID": "2",
    }
    assert found(environment)[:3] == (HOSTS[0], 3, 2)
    environment["KERAS_DISTRIBUTION_JOB_ADDRESSES"] = HOSTS[0]
    environment["KERAS_DISTRIBUTION_NUM_PROCESSES"] = "5"
    assert found(environment)[:3] == (HOSTS[0], 5, 2)


SCHEDULERS = {
    "Slurm": {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_NTASKS": "4"},
    "Open MPI": {
        "OMPI_MCA_orte_hnp_uri": "1;tcp://10.0.0.1:9",
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "4",
    },
    "Kubernetes": {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"},
    "Cloud TPU": {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "a,b"},
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_are_recognized_and_left_to_jax(name):
    assert found(SCHEDULERS[name]) == (None, None, None, name)


@pytest.mark.parametrize(
    "alone",
    [
        SCHEDULERS["Slurm"] | {"SLURM_NTASKS": "1"},
        SCHEDULERS["Open MPI"] | {"OMPI_COMM_WORLD_SIZE": "1"},
        {"SLURM_JOB_ID": "7"},
        SCHEDULERS["Cloud TPU"] | {"TPU_WORKER_HOSTNAMES": "a"},
    ],
)
def test_one_process_of_a_scheduler_is_no_cluster(alone):
    assert cluster.find(alone) is None


def test_tf_config_comes_before_the_scheduler():
    assert found(SCHEDULERS["Slurm"] | tf_config())[3] == "TF_CONFIG"


MISTAKES = {
    "not JSON": ({"TF_CONFIG": "{"}, "JSON"),
    "no object": ({"TF_CONFIG": "[1]"}, "JSON object"),
    "no task": ({"TF_CONFIG": json.dumps({"cluster": {"worker": HOSTS}})}, "task"),
    "no index": (tf_config(task={"type": "worker"}), "task.index"),
    "no type": (tf_config(task={"index": 0}), "task.type"),
    "index too large": (tf_config(index=3), "task.index.*0 to 2"),
    "index negative": (tf_config(index=-1), "task.index"),
    "index a word": (tf_config(index="one"), "task.index"),
    "index a bool": (tf_config(index=True), "task.index"),
    "address twice": (tf_config([HOSTS[0]] * 2), r"cluster.worker\[1\]"),
    "address without port": (tf_config(["10.0.0.1", *HOSTS]), r"cluster.worker\[0\]"),
    "port too large": (tf_config(["a:70000"], index=0), r"cluster.worker\[0\]"),
    "no addresses": (tf_config([], index=0), "cluster.worker"),
    "no list": (tf_config("10.0.0.1:1", index=0), "cluster.worker"),
    "unknown role": (tf_config(cluster={"boss": HOSTS}), "cluster.boss"),
    "two chiefs": (tf_config(cluster={"chief": HOSTS[:2]}), "cluster.chief"),
    "same in two roles": (
        tf_config(cluster={"chief": HOSTS[:1], "worker": HOSTS}),
        "cluster.worker",
    ),
    "role that is not there": (tf_config(role="chief", index=0), "task.type"),
    "evaluator": (
        tf_config(cluster={"worker": HOSTS, "evaluator": ["a:1"]}, role="evaluator"),
        "task.type",
    ),
    "no process id": (
        {"KERAS_DISTRIBUTION_JOB_ADDRESSES": HOSTS[0]},
        "KERAS_DISTRIBUTION_PROCESS_ID",
    ),
    "counts differ": (
        {
            "KERAS_DISTRIBUTION_JOB_ADDRESSES": ",".join(HOSTS),
            "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
            "KERAS_DISTRIBUTION_PROCESS_ID": "0",
        },
        "3 addresses",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_name_the_field(name):
    environment, text = MISTAKES[name]
    with pytest.raises(errors.ClusterSpecError, match=text) as caught:
        cluster.find(environment)
    assert "Received:" in str(caught.value)


@pytest.mark.parametrize(
    ("workers", "index", "text"),
    [
        ([], 0, "workers"),
        (["a"], 0, r"workers\[0\]"),
        (HOSTS, 3, "index"),
        (HOSTS, "0.5", "index"),
        ([HOSTS[0]] * 2, 0, r"workers\[1\]"),
    ],
)
def test_a_cluster_spec_is_checked(workers, index, text):
    with pytest.raises(errors.ClusterSpecError, match=text):
        km.ClusterSpec(workers=workers, index=index)


def test_a_cluster_spec_names_its_members():
    place = km.ClusterSpec(HOSTS, index=2).membership()
    assert (place.coordinator, place.num_workers, place.index) == (HOSTS[0], 3, 2)
    assert place.workers == tuple(HOSTS)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"cluster": "10.0.0.1:1"}, errors.ClusterSpecError),
        ({"auto_shard": "rows"}, errors.OptionValueError),
        ({"timeout_seconds": 0}, errors.OptionValueError),
        ({"heartbeat_seconds": True}, errors.OptionValueError),
        ({"view": "both"}, errors.OptionValueError),
        ({"runtime_options": "mtls_cert_file"}, errors.OptionValueError),
        ({"runtime_options": {"no_such_option": 1}}, errors.RuntimeOptionError),
        ({"runtime_options": {"process_id": 1}}, errors.RuntimeOptionError),
    ],
)
def test_wrong_options_are_refused_before_anything_is_joined(options, error):
    with pytest.raises(error):
        km.MultiWorkerMirroredStrategy(**options)


MTLS = {"mtls_cert_file": "a.pem", "mtls_key_file": "a.key", "mtls_ca_file": "ca.pem"}


def test_options_that_this_jax_lacks_are_named_with_its_version(monkeypatch):
    def initialize(coordinator_address, coordinator_bind_address=None):
        raise AssertionError("it is not reached")

    monkeypatch.setattr("jax.distributed.initialize", initialize)
    with pytest.raises(errors.RuntimeOptionError) as caught:
        km.MultiWorkerMirroredStrategy(runtime_options=MTLS)
    said = str(caught.value)
    assert f"Received: 'mtls_cert_file' with JAX {jax.__version__}" in said
    assert "It has coordinator_bind_address. (JAX 0.12 and newer" in said


def test_options_of_a_newer_jax_arrive(monkeypatch):
    """A function in the place of one that the installed JAX may not have."""
    got = {}

    def initialize(*, mtls_cert_file=None, mtls_key_file, mtls_ca_file, **more):
        got.update(more, mtls=[mtls_cert_file, mtls_key_file, mtls_ca_file])

    monkeypatch.setattr("jax.distributed.initialize", initialize)
    compat.check_runtime_options(MTLS)
    own = {"coordinator_bind_address": "0.0.0.0:9000"}
    compat.initialize(km.ClusterSpec(HOSTS, 0).membership(), 5, 7, MTLS | own)
    assert got["mtls"] == list(MTLS.values())
    assert got["coordinator_bind_address"] == "0.0.0.0:9000"
    assert (got["coordinator_address"], got["process_id"]) == (HOSTS[0], 0)


def test_the_coordinator_listens_at_its_own_address_alone(monkeypatch):
    got = {}
    monkeypatch.setattr("jax.distributed.initialize", lambda **all_: got.update(all_))
    compat.initialize(km.ClusterSpec(HOSTS, 0).membership(), 5, 7, {})
    assert got["coordinator_bind_address"] == HOSTS[0]


def test_jax_that_was_used_before_is_said():
    jax.devices()
    with pytest.raises(errors.ClusterStartError, match="at the top of the program"):
        km.MultiWorkerMirroredStrategy(km.ClusterSpec(["127.0.0.1:1", "b:1"], 0))


@pytest.mark.parametrize("make", [km.MirroredStrategy, km.CentralStorageStrategy])
def test_a_strategy_of_one_process_warns_among_several(make, monkeypatch):
    for name, value in launch_environment(1, 2).items():
        monkeypatch.setenv(name, value)
    with pytest.warns(errors.SeparateModelsWarning, match="worker 1 of 2"):
        make()


def test_the_index_of_a_cluster_spec_is_a_number():
    assert km.ClusterSpec(HOSTS, "0").index == 0


def launch_environment(index, count):
    return {
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": "127.0.0.1:1",
        "KERAS_DISTRIBUTION_NUM_PROCESSES": str(count),
        "KERAS_DISTRIBUTION_PROCESS_ID": str(index),
    }


def test_without_a_cluster_there_is_one_worker():
    with pytest.warns(errors.AloneWarning, match="one worker"):
        strategy = km.MultiWorkerMirroredStrategy()
    assert strategy.num_workers == 1 and strategy.is_chief
    assert strategy.num_replicas_in_sync == 4
