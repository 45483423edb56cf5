"""Every Keras metric, weighted metrics, and users' own metrics."""

import inspect

import numpy as np
import pytest
from keras import metrics, ops
from parity import (
    ROWS,
    check,
    fit,
    fit_evaluate_predict,
    mlp,
    numbers,
    sgd,
    weights_of_rows,
)

CLASSES = 4


def labels():
    return (np.arange(ROWS) ** 2 // 5 % CLASSES).astype("int32")


def binary_data():
    return numbers()[0], (labels()[:, None] % 2).astype("float32")


def sparse_data():
    return numbers()[0], labels()


def one_hot_data():
    return numbers()[0], np.eye(CLASSES, dtype="float32")[labels()]


def regression_data():
    x, y = numbers(outputs=CLASSES)
    return x, np.abs(y) + 0.1


BINARY = {
    "AUC": {"num_thresholds": 20},
    "BinaryAccuracy": {},
    "BinaryCrossentropy": {},
    "BinaryIoU": {},
    "FalseNegatives": {},
    "FalsePositives": {},
    "Hinge": {},
    "Precision": {},
    "PrecisionAtRecall": {"recall": 0.5},
    "Recall": {"thresholds": 0.4},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "SquaredHinge": {},
    "TrueNegatives": {},
    "TruePositives": {},
}
SPARSE = {
    "SparseCategoricalAccuracy": {},
    "SparseCategoricalCrossentropy": {},
    "SparseTopKCategoricalAccuracy": {"k": 2},
    "MeanIoU": {"num_classes": CLASSES, "sparse_y_pred": False},
    "IoU": {
        "num_classes": CLASSES,
        "target_class_ids": [0, 2],
        "sparse_y_pred": False,
    },
}
ONE_HOT = {
    "CategoricalAccuracy": {},
    "CategoricalCrossentropy": {},
    "CategoricalHinge": {},
    "F1Score": {"average": "macro"},
    "FBetaScore": {"average": "weighted", "beta": 2.0},
    "KLDivergence": {},
    "OneHotIoU": {"num_classes": CLASSES, "target_class_ids": [1]},
    "OneHotMeanIoU": {"num_classes": CLASSES},
    "TopKCategoricalAccuracy": {"k": 2},
}
REGRESSION = {
    "Accuracy": {},
    "ConcordanceCorrelation": {},
    "CosineSimilarity": {},
    "LogCoshError": {},
    "MeanAbsoluteError": {},
    "MeanAbsolutePercentageError": {},
    "MeanSquaredError": {},
    "MeanSquaredLogarithmicError": {},
    "PearsonCorrelation": {},
    "Poisson": {},
    "R2Score": {},
    "RootMeanSquaredError": {},
}
# data, table, output units, last activation, loss
GROUPS = {
    "binary": (binary_data, BINARY, 1, "sigmoid", "binary_crossentropy"),
    "sparse": (
        sparse_data,
        SPARSE,
        CLASSES,
        "softmax",
        "sparse_categorical_crossentropy",
    ),
    "one_hot": (one_hot_data, ONE_HOT, CLASSES, "softmax", "categorical_crossentropy"),
    "regression": (regression_data, REGRESSION, CLASSES, "softplus", "mse"),
}
# Bases, and two that take values and not (y_true, y_pred); those have tests of
# their own below.
NOT_COMPILED = {"Mean", "MeanMetricWrapper", "Metric", "Sum"}


# Keras' intersection over union asks for int64 and for integer weights, and gets
# int32 and float weights from everyone.
IOU_WARNINGS = [
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning"),
    pytest.mark.filterwarnings("ignore:You are passing weight as `float`:UserWarning"),
]


GROUPS_AND_MARKS = [pytest.param(group, marks=IOU_WARNINGS) for group in GROUPS]


def made(table, prefix):
    return [
        getattr(metrics, name)(**arguments, name=f"{prefix}_{name}")
        for name, arguments in table.items()
    ]


def test_tables_name_every_keras_metric():
    found = {
        name
        for name, value in vars(metrics).items()
        if inspect.isclass(value) and issubclass(value, metrics.Metric)
    }
    tested = set().union(*(group[1] for group in GROUPS.values()))
    assert found - NOT_COMPILED == tested


@pytest.mark.parametrize("group", GROUPS_AND_MARKS)
def test_metrics_match_one_device(group):
    data, table, units, activation, loss = GROUPS[group]

    def compile_args():
        return {"optimizer": sgd(), "loss": loss, "metrics": made(table, "plain")}

    build = lambda: mlp(outputs=units, activation=activation)  # noqa: E731
    want, _ = check(build, compile_args, fit_evaluate_predict(*data()))
    assert len(want.result["evaluate"]) == 1 + len(table)


@pytest.mark.parametrize("group", GROUPS_AND_MARKS)
def test_weighted_metrics_match_one_device(group):
    data, table, units, activation, loss = GROUPS[group]

    def compile_args():
        weighted = made(table, "weighted")
        return {"optimizer": sgd(), "loss": loss, "weighted_metrics": weighted}

    build = lambda: mlp(outputs=units, activation=activation)  # noqa: E731
    drive = fit(*data(), sample_weight=weights_of_rows())
    check(build, compile_args, drive)


# What users write -----------------------------------------------------------


class Largest(metrics.Metric):
    """Keeps a maximum, which no sum over replicas can merge."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.value = self.add_variable((), initializer="zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = ops.max(ops.abs(ops.cast(y_true, y_pred.dtype) - y_pred))
        self.value.assign(ops.maximum(self.value, error))

    def result(self):
        return ops.convert_to_tensor(self.value)


class Counts(metrics.Metric):
    """Counts rows and updates in integers."""

    def __init__(self, name="counts"):
        super().__init__(name=name)
        zeros = {"initializer": "zeros", "dtype": "int32"}
        self.rows = self.add_variable((), name="rows", **zeros)
        self.updates = self.add_variable((), name="updates", **zeros)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.rows.assign(self.rows + ops.shape(y_pred)[0])
        self.updates.assign(self.updates + 1)

    def result(self):
        return {"rows": self.rows + 0, "updates": self.updates + 0}


class LastMedian(metrics.Metric):
    """Keeps only the newest batch's median, and resets to -1."""

    def __init__(self, name="median"):
        super().__init__(name=name)
        self.value = self.add_variable((), initializer="zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.median(y_pred))

    def reset_state(self):
        self.value.assign(-1.0)

    def result(self):
        return self.value * 2.0


def spread(y_true, y_pred):
    """A metric function that is no mean over rows."""
    return ops.max(y_pred) - ops.min(y_pred)


@pytest.mark.parametrize("metric", [Largest, Counts, LastMedian])
def test_own_metric_matches_one_device(metric):
    def compile_args():
        return {"optimizer": sgd(), "loss": "mse", "metrics": [metric()]}

    check(mlp, compile_args, fit_evaluate_predict(*numbers()))


def test_metric_function_matches_one_device():
    def compile_args():
        return {"optimizer": sgd(), "loss": "mse", "metrics": [spread, "mae"]}

    check(mlp, compile_args, fit_evaluate_predict(*numbers()))


def test_metric_counts_each_row_once():
    def compile_args():
        return {"optimizer": sgd(), "loss": "mse", "metrics": [Counts()]}

    _, got = check(mlp, compile_args, fit_evaluate_predict(*numbers()))
    assert got.result["history"]["rows"] == [ROWS, ROWS]
    assert got.result["history"]["updates"] == [4, 4]
