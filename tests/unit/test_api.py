"""The public names: each new one is a reviewed line here."""

import copy
import inspect
import pickle

import keras
import pytest

import keras_mirror as km

NAMES = [
    "CentralStorageStrategy",
    "ClusterSpec",
    "ConsistencyCheck",
    "DistributedOptimizer",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "ReplicaContext",
    "ShardedCheckpoint",
    "Strategy",
    "__version__",
    "check_consistency",
    "errors",
    "get_strategy",
    "launch",
    "replica_context",
    "set_strategy",
]

STRATEGY_MEMBERS = [
    "devices",
    "distribute_dataset",
    "from_config",
    "gather",
    "get_config",
    "is_chief",
    "mesh",
    "name",
    "num_replicas_in_sync",
    "num_workers",
    "reduce",
    "run",
    "scope",
    "view",
]


def test_public_names():
    shown = {n for n in vars(km) if not n.startswith("_")} | {"__version__"}
    modules = {n for n in shown if inspect.ismodule(getattr(km, n))}
    assert sorted(shown - modules | {"errors"}) == sorted(NAMES)


def test_strategy_members():
    for member in STRATEGY_MEMBERS:
        assert hasattr(km.Strategy, member), member
    assert issubclass(km.Strategy, keras.distribution.DataParallel.__mro__[1])


@pytest.mark.parametrize("name", [n for n in NAMES if n[0] != "_" and n != "errors"])
def test_public_docstrings_say_what_it_does(name):
    doc = inspect.getdoc(getattr(km, name))
    assert doc and len(doc.splitlines()[0]) < 88 and doc.splitlines()[0].endswith(".")


def test_every_error_is_a_keras_mirror_error_or_warning():
    classes = [
        c
        for c in vars(km.errors).values()
        if inspect.isclass(c) and c.__module__ == km.errors.__name__
    ]
    assert len(classes) > 10
    # No error: the end of a process that was asked to leave.
    classes.remove(km.errors.PreemptedExit)
    for cls in classes:
        assert issubclass(cls, (km.errors.KerasMirrorError, Warning))


def test_compile_shows_its_argument():
    parameter = inspect.signature(keras.Model.compile).parameters["distribution"]
    assert parameter.default is None
    assert "distribution:" in (keras.Model.compile.__doc__ or "")


def test_config_makes_an_equal_strategy():
    strategy = km.MirroredStrategy(devices=["cpu:1", "cpu:3"], view="global")
    again = km.MirroredStrategy.from_config(strategy.get_config())
    assert again.get_config() == strategy.get_config()
    assert repr(strategy) == (
        "MirroredStrategy(devices=['cpu:1', 'cpu:3'], view='global', "
        "synchronize_batch_norm=False)"
    )
    one = km.OneDeviceStrategy("cpu:2")
    assert km.OneDeviceStrategy.from_config(one.get_config()).devices == ("cpu:2",)


def test_copies_of_a_strategy_are_equal():
    strategy = km.MirroredStrategy(devices=["cpu:0", "cpu:2"])
    for again in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert again.get_config() == strategy.get_config()
        assert again.mesh == strategy.mesh


def test_members_answer_for_one_process():
    strategy = km.MirroredStrategy()
    assert strategy.num_replicas_in_sync == 4 == strategy.num_model_replicas
    assert strategy.num_workers == 1 and strategy.is_chief
    assert dict(strategy.mesh.shape) == {"replica": 4}
    assert "cpu:3" in strategy._repr_html_() and "cpu:3" in str(strategy)
