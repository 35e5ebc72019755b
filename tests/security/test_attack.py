"""Attacks on jobs that have a secret: nothing of the attacker's runs, and nobody is admitted.

Under `ringway run` no job is disturbed. On a TCP store, which anyone who reaches it can write, tampering is named.
`make attack` makes 10,000 attempts.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

import ringway as dist
from free_ports import free_port
from ringway.errors import RingwayError
from ringway.store import KeyedStore, beneath_prefixes, read
from ringway.testing import RankContext, RankPool
from ringway.testing.rank import leave

ATTEMPTS = int(os.environ.get("RINGWAY_ATTACK", "100"))
SECRET = "0123456789abcdef" * 4
ATTACKER = Path(__file__).with_name("attacker.py")


def _obstacle() -> str | None:
    if os.geteuid() != 0:
        return "becoming another user needs root"
    for tool, package in (("ip", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(tool) is None:
            return f"'{tool}' is missing; install {package}"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, timeout=60)
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else None


@pytest.mark.processes
@pytest.mark.timeout(1200)
def test_another_user_of_the_host_gets_nothing_and_disturbs_nothing() -> None:
    obstacle = _obstacle()
    if obstacle is not None:
        if os.environ.get("CI"):
            pytest.fail(f"there can be no attacker: {obstacle}")
        pytest.skip(obstacle)
    command = ["unshare", "--net", sys.executable, str(ATTACKER), str(ATTEMPTS)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1100)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["code"] == 0, found
    assert found["got"] == []
    assert sum(found["attempts"].values()) == ATTEMPTS, found
    assert len(found["attempts"]) == 8, found
    lines = found["output"].splitlines()
    assert len(lines) == 2, found
    assert all(" made " in line for line in lines), found
    print(json.dumps(found["attempts"]))


# On a TCP store


class _Code:
    """Notes that a stranger's object was unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["RINGWAY_TEST_MARK"],)


class _Stranger:
    """Changes or deletes a key of the store as soon as it appears, one of the first forty that do; or puts back a value
    that a key had before. If it has had no chance when the ranks have done their work, it does so then."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._random = random.Random(seed)
        self._action = ("forge", "delete", "put back")[seed % 3]
        self._turn = self._random.randrange(6 if self._action == "put back" else 40)
        self._values: dict[str, list[bytes]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.changed: list[str] = []

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(10)

    def _run(self) -> None:
        store: Any = None
        last = False
        while not self.changed and not last:
            last = self._ended.is_set()
            try:
                store = store or TCPStore("127.0.0.1", self._port, is_master=False, wait_for_workers=False)
                found = {key: read(store, key) for key in store.list_keys() if "init/" not in key}
            except Exception:  # not open yet, or closed
                time.sleep(0.001)
                continue
            for key, value in found.items():
                values = self._values.setdefault(key, [])
                if value is not None and value not in values and not self.changed:
                    values.append(value)
                    if self._is_turn(values):
                        self._change(store, key)
            chances = [key for key, values in self._values.items() if len(values) > (self._action == "put back")]
            if last and not self.changed and chances:
                self._change(store, self._random.choice(chances))

    def _is_turn(self, values: list[bytes]) -> bool:
        self._turn -= self._action != "put back" or len(values) > 1
        return self._turn < 0

    def _change(self, store: Any, key: str) -> None:
        values = self._values[key]
        if self._action == "delete":
            store.delete_key(key)
        else:
            store.set(key, self._random.choice(values[:-1] if self._action == "put back" else self._forged(key)))
        self.changed.append(key)

    def _forged(self, key: str) -> list[bytes]:
        damaged = bytearray(self._values[key][-1] or b"\0")
        damaged[self._random.randrange(len(damaged))] ^= 1 << self._random.randrange(8)
        others = [values[-1] for other, values in self._values.items() if values and other != key]
        return [bytes(damaged), b"", self._random.randbytes(60), pickle.dumps(_Code()), *others[:1]]


def _start_under_attack(context: RankContext, port: int, seed: int) -> tuple[str, list[str]]:
    """How the start went, and the keys that the stranger changed, if this rank knows."""
    leave()  # the group of an earlier test
    os.environ.update(RANK=str(context.rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    stranger = _Stranger(port, seed)
    if context.rank == 0:
        stranger.start()
    try:
        dist.init_distributed(dist_backend=random.Random(seed).choice([None, "gloo"]), timeout=20, verbose=False)
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0] * 4
        assert dist.allgather_object(context.rank) == [0, 1]
        group = dist.new_group()
        dist.barrier(group)
        dist.destroy_process_group(group)
        for _ in range(10):  # older values to put back
            dist.communicator().info.store.add("count", 1)
            time.sleep(0.002)
        dist.barrier()
        stranger.end()
        dist.barrier()
        _look_around()
    except RingwayError as error:
        return f"{type(error).__name__}: {error}", stranger.changed
    except Exception as error:  # torch's own: a wait for a key that was changed into nothing
        return f"torch: {type(error).__name__}: {error}", stranger.changed
    finally:
        stranger.end()
        dist.destroy_process_group()
    return "fine", stranger.changed


def _look_around() -> None:
    """What a rank does that waits for more than a second. It knows at most 64 keys here, so it looks at all."""
    store: Any = beneath_prefixes(dist.communicator().info.store)
    store._known._next = 0.0
    assert not store.check(["never set"])


def _names_tampering(text: str) -> bool:
    return any(named in text for named in ("without the job's secret", "stranger", "secret, and rank"))


@pytest.mark.timeout(4000)
def test_tampering_with_a_tcp_store_is_named_and_runs_nothing(pool: RankPool, tmp_path: Path) -> None:
    if not hasattr(TCPStore, "list_keys"):
        pytest.skip("this torch has no way to list the keys of a store")
    mark = tmp_path / "code ran"
    environment: dict[str, str | None] = {"RINGWAY_JOB_SECRET": SECRET, "RINGWAY_TEST_MARK": str(mark)}
    told: list[str] = []
    for seed in range(max(9, ATTEMPTS // 100)):
        outcomes = pool.try_run(
            _start_under_attack, free_port(), seed, world_size=2, timeout=120, environment=environment
        )
        assert all(outcome.ok for outcome in outcomes), f"seed {seed}: {[str(outcome) for outcome in outcomes]}"
        texts = [f"{outcome.value[0]}: {outcome.value[1]} {outcome.output}" for outcome in outcomes]
        # One rank may only see that the other has gone, or print what it found and go on.
        if not any(map(_names_tampering, texts)):
            assert all(text.startswith("fine") for text in texts), f"{seed}: {texts}"
            # No rank reads these again: they are of the roll call, which has ended.
            assert all("/job/" not in key for key in outcomes[0].value[1]), f"{seed}: {texts}"
        told += texts
    assert not mark.exists()
    for text in told:
        print(text[:300].replace("\n", " "))


def _connect_under_attack(context: RankContext, port: int) -> str:
    """gloo on rank 0 waits for its own key first, then in native code for rank 1, which never sees that key."""
    leave()
    os.environ.update(RANK=str(context.rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_distributed(dist_backend="gloo", verbose=False)
    if context.rank == 1:
        context.store.wait(["deleted"])
    get = KeyedStore.multi_get

    def get_and_delete(store: KeyedStore, keys: list[str]) -> list[bytes]:
        values = get(store, keys)
        if context.rank == 0 and keys[0].endswith("//0/0"):
            store.inner.delete_key(keys[0])
            context.store.set("deleted", "")
        return values

    try:
        with patch.object(KeyedStore, "multi_get", get_and_delete):
            dist.barrier(dist.new_group())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.destroy_process_group()
    return "fine"


def test_a_key_deleted_while_gloo_connects_is_named(pool: RankPool) -> None:
    environment: dict[str, str | None] = {"RINGWAY_JOB_SECRET": SECRET}
    told = pool.run(_connect_under_attack, free_port(), world_size=2, environment=environment)
    assert any(map(_names_tampering, told)), told
    assert "fine" not in told
