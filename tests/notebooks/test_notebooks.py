"""Every notebook runs from top to bottom and shows what it is there to show."""

import functools
import os
from pathlib import Path

import nbformat
import pytest
from ipykernel.kernelspec import write_kernel_spec
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CELL_TIMEOUT_SECONDS = 300


def own_kernel(folder):
    """A kernel of this interpreter, whatever kernels the machine has or lacks."""
    write_kernel_spec(str(folder / "python3"))
    specs = KernelSpecManager(kernel_dirs=[str(folder)], ensure_native_kernel=False)
    return AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)


def environment(folder):
    """Ours without what the tests set and a user's kernel has not.

    The notebook sets its device count itself, and JAX takes it from one place only.
    On a machine with a GPU it has to show the virtual devices all the same.
    """
    ours = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    path = os.pathsep.join(filter(None, (str(ROOT), ours.get("PYTHONPATH"))))
    return ours | {
        "IPYTHONDIR": str(folder / "ipython"),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": path,
    }


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Gives a notebook, by name, after it ran; an error in a cell is raised."""

    @functools.cache
    def run(name):
        folder = tmp_path_factory.mktemp(name)
        client = NotebookClient(
            nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4),
            km=own_kernel(folder / "kernels"),
            timeout=CELL_TIMEOUT_SECONDS,
            resources={"metadata": {"path": str(folder)}},
        )
        # nbclient leaves the kernel of a manager that it did not make running,
        # unless told.
        client.execute(env=environment(folder), cleanup_kc=True)
        return client.nb

    return run


def outputs(notebook, kind):
    """All outputs of a kind: a MIME type, or "stdout"."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.get("name") == kind:
                found.append(output.text)
            elif kind in output.get("data", {}):
                found.append(output.data[kind])
    return found


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == [
        "01_mirrored",
        "02_multi_worker",
        "03_parameter_server",
    ]


@pytest.mark.parametrize("name", [path.stem for path in NOTEBOOKS])
def test_notebook_runs_to_its_end(executed, name):
    code = [cell for cell in executed(name).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))


def test_mirrored_notebook_shows_mesh_plot_and_comparison(executed):
    notebook = executed("01_mirrored")
    (mesh,) = [text for text in outputs(notebook, "text/html") if "figure" in text]
    for device in range(4):
        assert f"cpu:{device}" in mesh
    assert len(outputs(notebook, "image/png")) == 1
    printed = "".join(outputs(notebook, "stdout"))
    assert "largest weight difference" in printed
    assert "one device" in printed


def test_multi_worker_notebook_shows_cluster_plot_comparison_and_failure(executed):
    notebook = executed("02_multi_worker")
    printed = "".join(outputs(notebook, "stdout"))
    assert "worker 0 of 2" in printed and "worker 1 of 2" in printed
    assert "replica axis: 4 devices" in printed
    assert len(outputs(notebook, "image/png")) == 1
    assert "one device" in printed and "largest weight difference" in printed
    assert "worker 1 failed first" in printed and "in fail_on_worker_1" in printed
    assert "FileNotFoundError: no such file: shard-1.npz" in printed


def test_parameter_server_notebook_shows_estimate_summaries_and_comparison(executed):
    notebook = executed("03_parameter_server")
    pages = [page for page in outputs(notebook, "text/html") if "figure" in page]
    assert len(pages) == 3  # the estimate, the servers, and the one place
    assert "(mirrored)" in pages[0] and "split: 256 of 1024 each" in pages[1]
    assert "on cpu:0" in pages[2]
    printed = "".join(outputs(notebook, "stdout"))
    difference = float(printed.partition("to one device: ")[2].split()[0])
    assert difference < 1e-5
    assert "the same weights: True" in printed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_without_outputs(path):
    for cell in nbformat.read(path, as_version=4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
