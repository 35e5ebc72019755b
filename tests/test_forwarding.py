"""Submodules of torch.distributed under ringway's name."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path

import pytest
import torch.distributed

import ringway
from ringway import forwarding

SUBMODULES = (
    "checkpoint.state_dict",
    "device_mesh",
    "elastic.multiprocessing.errors",
    "fsdp",
    "nn",
    "nn.functional",
    "tensor.parallel",
)


def test_they_are_torchs_own_modules() -> None:
    for name in SUBMODULES:
        ours = importlib.import_module(f"ringway.{name}")
        theirs = importlib.import_module(f"torch.distributed.{name}")
        assert ours is theirs
        assert theirs.__spec__ is not None
        assert theirs.__spec__.name == theirs.__name__ == f"torch.distributed.{name}"
    from ringway.fsdp import fully_shard  # type: ignore[import-not-found]

    assert fully_shard is torch.distributed.fsdp.fully_shard
    assert ringway.tensor.parallel is torch.distributed.tensor.parallel


def test_what_neither_has_is_not_found() -> None:
    for name in ("ringway.nonsense", "ringway.fsdp.nonsense", "ringway.launch.nonsense"):
        with pytest.raises(ModuleNotFoundError, match=f"No module named '{name}'"):
            importlib.import_module(name)
    with pytest.raises(AttributeError, match=r"neither ringway.config nor torch.distributed.config has"):
        _ = ringway.config.nonsense
    for name in ("nonsense", "__path__"):  # as config in torch 2.8
        with pytest.raises(AttributeError, match=r"neither ringway.call nor torch.distributed.call has"):
            forwarding.attributes_of("call")(name)


def test_ringways_own_submodules_lead_on_to_torchs_of_the_same_name() -> None:
    page = (Path(__file__).parents[1] / "docs" / "torch.md").read_text()
    shared = [
        own.name
        for own in pkgutil.iter_modules(ringway.__path__)
        if importlib.util.find_spec(f"torch.distributed.{own.name}") is not None
    ]
    assert "launch" in shared  # torch 2.8 has no config
    for name in shared:
        ours = importlib.import_module(f"ringway.{name}")
        theirs = importlib.import_module(f"torch.distributed.{name}")
        assert ours is not theirs
        assert f"| `ringway.{name}` |" in page
        beneath = {own.name for own in pkgutil.iter_modules(getattr(ours, "__path__", []))}
        for attribute in {public for public in vars(theirs) if not public.startswith("_")} - vars(ours).keys():
            if attribute in beneath:
                assert getattr(ours, attribute).__name__ == f"ringway.{name}.{attribute}"
            else:
                assert getattr(ours, attribute) is getattr(theirs, attribute)


def test_a_file_of_ringways_hides_torchs_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ringway.launch.run", raising=False)  # as if it were not imported yet
    monkeypatch.delattr(ringway.launch, "run", raising=False)
    from ringway.launch import run

    assert run.__name__ == "ringway.launch.run"


def test_there_is_one_finder() -> None:
    forwarding.install()
    assert sum(isinstance(finder, forwarding._Forwarder) for finder in sys.meta_path) == 1
