"""Names of backends: ringway's own, and those that torch or a package for torch provides."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ringway.backends import registry
from ringway.errors import BackendUnavailable


def test_torchs_own_backends_have_separate_names() -> None:
    assert registry.torch_spelling("torch:mpi") == "mpi"
    assert registry.user_spelling("mpi") == "torch:mpi"
    assert registry.torch_spelling("mpi") == "mpi4py"
    assert registry.user_spelling("mpi4py") == "mpi"
    assert registry.user_spelling("ccl") == "torch:ccl"
    assert registry.user_spelling(registry.torch_spelling("ccl")) == "ccl"


def test_oneccl_bindings_for_torch_are_used_on_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="Install oneccl_bindings_for_pytorch"):
        registry.torch_spelling("torch:ccl")
    (tmp_path / "oneccl_bindings_for_pytorch.py").write_text("imported = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert registry.torch_spelling("torch:ccl") == "ccl"
    assert sys.modules.pop("oneccl_bindings_for_pytorch").imported


def test_backends_of_several_devices_have_one_name_in_torch() -> None:
    spelled = registry.torch_spelling("cpu:gloo,cuda:nccl")
    assert spelled == "ringway_cpu_gloo_cuda_nccl"
    assert registry.user_spelling(spelled) == "cpu:gloo,cuda:nccl"
    together = registry.combined("cpu:gloo,cuda:nccl")
    assert together is not None
    assert (together.devices, together.others["cuda"].name) == (("cpu",), "nccl")
    assert registry.combined("cuda:nccl,cpu:gloo") is together, "the order of the names does not matter"
    assert registry.combined("gloo") is None
    assert registry.combined("cpu:gloo,cuda:gloo") is None


def test_the_users_spelling_names_no_backend_of_torchs() -> None:
    for spelling in ("cpu:gloo", "cpu:gloo,cuda:gloo", "cpu:mpi", "gloo", "torch:mpi", "cpu:shm"):
        assert registry.user_spelling(registry.torch_spelling(spelling)) == spelling


def test_another_class_may_serve_a_backend_on_a_device() -> None:
    on_cuda = registry.on_device("shm", "cuda")
    assert on_cuda is not None
    assert on_cuda.devices == ("cuda",)
    assert registry.on_device("shm", "cpu") is registry.own("shm")
    assert registry.on_device("nccl", "cuda") is registry.own("nccl")
    assert registry.on_device("nccl", "cpu") is None
    assert registry.on_device("unheard_of", "cpu") is None
