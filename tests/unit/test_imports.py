"""Imports go down, and `keras.src` stays in one file."""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parents[2] / "keras_mirror"
# Who may import whom. A file not named here is looked up by its folder.
EDGES = {
    "errors": set(),
    "_version": set(),
    "_startup": set(),
    "_context": set(),
    "_seeds": set(),
    "display": set(),
    "_engine": {"errors"},
    "cluster": {"cluster", "errors"},
    "callbacks": {"callbacks", "_context", "_engine", "_seeds", "errors"},
    "_jax": {"_jax", "_context", "_engine", "_seeds", "cluster", "errors"},
    "_tensorflow": {"_tensorflow", "_context", "_engine", "_seeds", "errors"},
    "optimizer": {"_context", "_engine", "errors"},
    "strategies": {"strategies", "display", "cluster", "_context", "_engine", "errors"},
    "worker_data": {"worker_data", "_engine", "errors"},
    "_binding": {"strategies", "optimizer", "_context", "_engine", "errors"},
    "_calls": {"_binding", "callbacks", "strategies", "_context", "_engine", "errors"},
    "_plugin": {
        "_binding",
        "_calls",
        "worker_data",
        "callbacks",
        "strategies",
        "optimizer",
        "_context",
        "_engine",
        "errors",
    },
    "demo": {
        "demo",
        "display",
        "strategies",
        "_engine",
        "_plugin",
        "errors",
        "cluster",
    },
    "launch": {"launch", "cluster", "errors"},
    "command_line": {"demo", "launch", "errors"},
    "__main__": {"command_line"},
}
FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def part_of(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def edges(path):
    """The parts of keras_mirror that a file imports."""
    for module in imported_modules(path):
        names = module.split(".")
        if names[0] == "keras_mirror" and len(names) > 1:
            yield names[1]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_follow_the_edges(path):
    allowed = EDGES[part_of(path)] | {part_of(path)}
    if path.name == "__init__.py":
        allowed |= {part_of(path)}
    assert set(edges(path)) <= allowed


def test_every_edge_is_in_use():
    used = {name: set() for name in EDGES}
    for path in FILES:
        used[part_of(path)] |= set(edges(path)) - {part_of(path)}
    unused = {k: (v - {k}) - used[k] for k, v in EDGES.items()}
    assert not any(unused.values()), unused


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_keras_internals_stay_in_the_plugin(path):
    inside = [m for m in imported_modules(path) if m and m.startswith("keras.src")]
    assert not inside or path.name == "_plugin.py"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_strategies_import_no_backend(path):
    if part_of(path) not in ("strategies", "_context", "errors", "optimizer"):
        return
    backends = {"jax", "jaxlib", "tensorflow", "torch"}
    assert not backends & {m.split(".")[0] for m in imported_modules(path)}
