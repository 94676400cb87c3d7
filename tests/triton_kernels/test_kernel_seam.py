"""The seam: when kernels are asked, where they are loaded from, and what is said when there are none."""

import copy
import json
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from convert.__main__ import main
from modeling_dsv4 import kernel_seam
from modeling_dsv4.kernel_seam import AUTO, KernelSet, KernelsMixin, find_kernel

ADDS = "def add(x, y):\n    return x + y\n\n\ndef double(x):\n    return 2 * x\n\n\ndouble.has_backward = True\n"


class Adder(nn.Module):
    kernels = AUTO

    def forward(self, x):
        kernel = find_kernel(self.kernels, "add", x)
        return "reference" if kernel is None else "kernel"


class Model(KernelsMixin, nn.Module):
    def __init__(self):
        super().__init__()
        self.adder, self.other = Adder(), nn.Linear(2, 2)

    def forward(self, x):
        return self.adder(x)


@pytest.fixture
def make_repository(tmp_path):
    """Write a repository with two functions in plain PyTorch."""

    def make(version=kernel_seam.VERSION, name="toy"):
        variant = tmp_path / name / "build" / "torch-universal"
        variant.mkdir(parents=True)
        text = f"VERSION = {version}\n__all__ = ['add', 'double']\n\n\n{ADDS}"
        (variant / "__init__.py").write_text(text, encoding="utf-8")
        metadata = {"id": f"_{name}_{tmp_path.name}", "name": name, "version": version, "license": "Apache-2.0"}
        metadata |= {"python-depends": [], "backend": {"type": "cpu"}}
        (variant / "metadata.json").write_text(json.dumps(metadata).replace("-1_", "_"), encoding="utf-8")
        return tmp_path / name

    return make


def test_the_choice_reaches_modules_that_can_use_kernels(make_repository, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # also where a GPU is
    model, x = Model(), torch.ones(2)
    assert model(x) == "reference"  # "auto" serves CUDA tensors alone
    model.set_kernels(make_repository())
    assert model(x) == "kernel" and not hasattr(model.other, "kernels")
    assert copy.deepcopy(model)(x) == "kernel" and pickle.loads(pickle.dumps(model))(x) == "kernel"
    model.set_kernels("off")
    assert model.adder.kernels is None and model(x) == "reference"
    model.set_kernels("auto")
    assert model.adder.kernels is AUTO


def test_which_tensors_are_served(make_repository, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    kernels, x = KernelSet(str(make_repository())), torch.ones(2)
    assert find_kernel(kernels, "add", x)(x, x).tolist() == [2, 2]
    assert find_kernel(kernels, "missing", x) is None
    assert find_kernel(None, "add", x) is None
    assert find_kernel(kernels, "add", x.double()) is None
    assert find_kernel(kernels, "add", x, x.to("meta")) is None
    # A kernel without a backward does not run where a gradient is asked for.
    weight = nn.Parameter(x)
    assert find_kernel(kernels, "add", x, weight) is None and find_kernel(kernels, "double", weight) is not None
    with torch.no_grad():
        assert find_kernel(kernels, "add", x, weight) is not None
    compiled = torch.compile(lambda x: x + (find_kernel(kernels, "add", x) is None), backend="eager")
    assert compiled(x).tolist() == [2, 2]
    monkeypatch.delenv("TRITON_INTERPRET")
    assert find_kernel(kernels, "add", x) is None


@pytest.mark.parametrize("value", ["on", None, 1, True, "/no/such/folder"])
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match="accepted: 'auto', 'off' or the folder of a repository"):
        Model().set_kernels(value)


def test_a_folder_that_is_no_repository_raises(tmp_path, make_repository):
    model = Model()
    with pytest.raises(OSError, match="is no kernel repository"):
        model.set_kernels(tmp_path)
    with pytest.raises(OSError, match=f"has version 99; accepted: {kernel_seam.VERSION}"):
        model.set_kernels(make_repository(version=99, name="other"))
    assert model.adder.kernels is AUTO


def test_without_the_library_a_path_says_what_to_install(make_repository, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "kernels", None)
    with pytest.raises(ImportError, match="pip install kernels"):
        Model().set_kernels(make_repository())


def test_auto_prefers_the_installed_package_then_the_hub(make_repository, monkeypatch):
    assert kernel_seam._installed_or_from_hub().__name__ == kernel_seam.INSTALLED
    monkeypatch.setattr(kernel_seam, "INSTALLED", "no_such_package")
    monkeypatch.setenv("LOCAL_KERNELS", f"{kernel_seam.REPOSITORY}={make_repository()}")
    assert kernel_seam._installed_or_from_hub().add(1, 2) == 3


def test_no_kernels_mean_the_reference_and_one_warning(monkeypatch):
    warned = []
    monkeypatch.setattr(kernel_seam, "INSTALLED", "no_such_package")
    monkeypatch.setitem(__import__("sys").modules, "kernels", None)
    monkeypatch.setattr(kernel_seam, "logger", SimpleNamespace(warning_once=warned.append))
    kernels = KernelSet("auto")
    assert kernels.load() is None and kernels.load() is None
    assert len(warned) == 1 and "reference maths" in warned[0] and kernel_seam.REPOSITORY in warned[0]


def test_the_command_writes_what_the_library_loads(tmp_path, capsys):
    folder = tmp_path / "repository"
    assert main(["kernels", str(folder)]) == 0 and str(folder) in capsys.readouterr().out
    assert (folder / "CARD.md").is_file()
    metadata = json.loads((folder / "build" / "torch-universal" / "metadata.json").read_text(encoding="utf-8"))
    assert metadata["name"] == "dsv4-kernels" and metadata["license"] == "Apache-2.0"
    loaded, package = KernelSet(str(folder)).load(), kernel_seam._installed_or_from_hub()
    assert loaded.__name__ == metadata["id"] and loaded.__all__ == package.__all__
    assert main(["kernels", str(folder)]) == 1 and "not an empty folder" in capsys.readouterr().err
