"""ringway's plugin for vLLM, beside a stand-in for the classes of vLLM that it uses. `make vllm` runs vLLM itself."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import types
from importlib import metadata
from typing import Any

import pytest
import torch
import torch.distributed as c10d

import ringway
import ringway_autoload
from ringway.groups import replacement
from ringway.testing import RankContext, RankPool
from ringway.testing.rank import leave


class _Own:
    """vLLM's CpuCommunicator, as far as ringway's builds on it."""

    def __init__(self, cpu_group: Any, device: Any, device_group: Any, unique_name: str, use_all2all: bool) -> None:
        self.cpu_group, self.device_group, self.unique_name = cpu_group, device_group, unique_name
        self.ranks = c10d.get_process_group_ranks(cpu_group)
        self.has_own_memory = unique_name.startswith(("tp", "pp"))
        self.dist_module: Any = c10d
        self.supports_tensor_dict = self.has_own_memory

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.dist_module.all_reduce(tensor, group=self.device_group)
        return tensor

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        c10d.broadcast(tensor, self.ranks[src], self.device_group)
        return tensor

    def destroy(self) -> None:
        pass


class _Platform:
    device_name = "cpu"

    @classmethod
    def is_cpu(cls) -> bool:
        return cls.device_name == "cpu"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "vLLM's own"


class _Cuda(_Platform):
    device_name = "cuda"


def _stand_in(monkeypatch: pytest.MonkeyPatch, platform: Any) -> None:
    where = "vllm.distributed.device_communicators.cpu_communicator"
    contents = {
        "vllm.platforms": {"current_platform": platform},
        "vllm.logger": {"init_logger": logging.getLogger},
        where: {"CpuCommunicator": _Own},
    }
    for name in ("vllm", "vllm.distributed", where.rpartition(".")[0], *contents):
        module = types.ModuleType(name)
        vars(module).update(contents.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)


def test_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Platform(_Platform):
        pass

    _stand_in(monkeypatch, Platform())
    for off in (None, "", "0"):
        monkeypatch.delenv("RINGWAY_VLLM", raising=False)
        if off is not None:
            monkeypatch.setenv("RINGWAY_VLLM", off)
        ringway_autoload.vllm_plugin()
        assert Platform.get_device_communicator_cls() == "vLLM's own"
    monkeypatch.setenv("RINGWAY_VLLM", "yes")
    with pytest.raises(ValueError, match="use 1, or 0"):
        ringway_autoload.vllm_plugin()
    monkeypatch.setenv("RINGWAY_VLLM", "1")
    for _ in range(2):  # vLLM may load a plugin several times
        ringway_autoload.vllm_plugin()
        assert Platform.get_device_communicator_cls() == "ringway.compat.vllm.communicator.RingwayCommunicator"
    assert _Platform.get_device_communicator_cls() == "vLLM's own"
    _stand_in(monkeypatch, _Cuda())
    ringway_autoload.vllm_plugin()
    assert _Cuda.get_device_communicator_cls() == "vLLM's own"
    assert "RINGWAY_VLLM=1 has no effect: it is for CPUs, and vLLM runs on cuda" in capsys.readouterr().err


def test_a_plugin_that_is_off_does_not_import_ringway() -> None:
    program = "import sys, ringway_autoload; ringway_autoload.vllm_plugin(); print('ringway' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RINGWAY_")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False\n"


def test_vllm_finds_the_plugin() -> None:
    (found,) = [entry for entry in metadata.entry_points(group="vllm.general_plugins") if entry.name == "ringway"]
    assert found.load() is ringway_autoload.vllm_plugin


def communicators(context: RankContext) -> None:
    """Two groups of the same ranks, and one of half of them, as vLLM makes them: with torch, on gloo, or on what
    replaces it."""
    leave()  # the group of an earlier test
    replacement.install()
    c10d.init_process_group("gloo", store=context.store, rank=context.rank, world_size=context.world_size)
    with pytest.MonkeyPatch.context() as patch:
        _stand_in(patch, _Platform())
        patch.delitem(sys.modules, "ringway.compat.vllm.communicator", raising=False)
        from ringway.compat.vllm.communicator import RingwayCommunicator

        first = 2 * (context.rank // 2)
        pairs = [c10d.new_group([0, 1]), c10d.new_group([2, 3])]
        made = [
            RingwayCommunicator(group, None, group, name)
            for name, group in (("tp:0", c10d.group.WORLD), ("pp:0", c10d.group.WORLD), ("tp:1", pairs[first // 2]))
        ]
        world, _, pair = made
        for one in made:
            assert one.dist_module is ringway
            assert one.supports_tensor_dict
            assert not one.has_own_memory, "vLLM would have made shared memory of its own"
            assert one.unique_name in ("tp:0", "pp:0", "tp:1")
            assert ringway.get_backend(one.device_group) == "shm"
        assert world.all_reduce(torch.ones(3)).tolist() == [context.world_size] * 3
        assert pair.all_reduce(torch.full((1,), float(context.rank))).item() == 2 * first + 1
        assert pair.broadcast(torch.tensor([context.rank]), 1).item() == first + 1
        transposed = torch.arange(12.0).view(3, 4).t()
        sent = {
            "a": transposed,
            "none": torch.empty(0, 5),
            "word": "no tensor",
            "b": torch.ones(2, dtype=torch.bfloat16),
        }
        if context.rank == first:
            pair.send_tensor_dict(sent, 1)  # a rank of the group, not of the world
        else:
            arrived = pair.recv_tensor_dict(0)
            assert list(arrived) == list(sent)
            assert arrived.pop("word") == "no tensor"
            for key, tensor in arrived.items():
                assert tensor.dtype == sent[key].dtype
                assert torch.equal(tensor, sent[key])
        for one in made:
            one.destroy()
        assert c10d.get_world_size(pairs[first // 2]) == 2, "vLLM's own group is still there"
    c10d.destroy_process_group()


@pytest.mark.parametrize("replaced", [None, replacement.ONLY])
def test_communicators_of_several_groups(pool: RankPool, replaced: str | None) -> None:
    pool.run(communicators, world_size=4, environment={replacement.VARIABLE: replaced})
