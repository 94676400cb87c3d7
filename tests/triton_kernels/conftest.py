"""Kernels run on the GPU if there is one, else under Triton's interpreter, which must be chosen before they are imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def repository(tmp_path_factory):
    """The kernels as `convert kernels` writes them."""
    from convert.kernel_repository import write_kernels

    return write_kernels(tmp_path_factory.mktemp("kernels") / "repository")
