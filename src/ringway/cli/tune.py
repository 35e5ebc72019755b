"""`ringway tune`: finds the fastest backend for each op and size of this job, and saves them for the next run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringway.errors import UsageError

if TYPE_CHECKING:
    from ringway.backends.several.policy import Policy
    from ringway.bench.tune import Medians, Progress


def tune(
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", min=1, help="Start this many ranks here. Omit under a launcher.")
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")] = Path("ringway-policy.json"),
    backends: Annotated[
        str, typer.Option(help="Backends to compare, separated by commas; by default, all that work here.")
    ] = "",
    ops: Annotated[str, typer.Option(help="Ops, separated by commas; by default, the common ones.")] = "",
    sizes: Annotated[str, typer.Option(help="Sizes in bytes, separated by commas.")] = "",
    rounds: Annotated[int, typer.Option(min=3, help="Samples per candidate.")] = 15,
    device: Annotated[
        str, typer.Option(help="cpu, cuda or all: whose tensors.", show_default="cuda too if every rank has a GPU")
    ] = "",
) -> None:
    """Measure a job's backends against each other, and write the fastest for each op and size to a file.

    Use -n to start ranks on this host, or run it as a whole job: mpiexec -n 8 ringway tune, or under Slurm or torchrun.
    CUDA tensors are measured on nccl, shm and gloo.
    """
    wanted = _Wanted(output, _names(backends), _names(ops), [_size(text) for text in _names(sizes)], rounds, device)
    wanted.check()
    if ranks is not None:
        from ringway.launch import run as launcher

        arguments = ["--output", str(output), "--backends", backends, "--ops", ops, "--sizes", sizes]
        arguments += ["--device", device]
        command = [sys.executable, "-m", "ringway.cli", "tune", *arguments, "--rounds", str(rounds)]
        outcome = launcher.run(command, ranks)
        if outcome.code:
            print(f"ringway tune: {outcome.summary}", file=sys.stderr, flush=True)
        raise typer.Exit(outcome.code)
    _tune_here(wanted)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _size(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise typer.BadParameter(f"{text!r} is not a number of bytes", param_hint="--sizes")
    return int(text)


@dataclass(frozen=True)
class _Wanted:
    """The command's options; empty ones get their defaults."""

    output: Path
    backends: list[str]
    ops: list[str]
    sizes: list[int]
    rounds: int
    device: str

    def check(self) -> None:
        """Reject invalid options before anything is measured."""
        from ringway.backends import registry
        from ringway.bench.tune import check_ops

        check_ops(self.ops)
        for name in self.backends:
            registry.parse(name)
            if registry.own(name) is None:
                raise typer.BadParameter(f"{name} cannot be mixed with other backends", param_hint="--backends")
        if self.device not in ("", "cpu", "cuda", "all"):
            raise typer.BadParameter(f"{self.device}: choose cpu, cuda or all", param_hint="--device")


def _tune_here(wanted: _Wanted) -> None:
    import ringway
    from ringway.bench import tune as bench

    os.environ.pop("RINGWAY_POLICY", None)  # measure the backends, not an earlier policy
    ringway.init_distributed("gloo", verbose=False, config={"ringway": {"policy": None}})
    first = ringway.get_rank() == 0
    obstacle = ringway.broadcast_object(_unwritable(wanted.output) if first else None)
    if obstacle is not None:
        raise UsageError(f"cannot write {wanted.output}: {obstacle}")
    has_gpu = wanted.device != "cpu" and bench.has_gpu()
    if wanted.device in ("cuda", "all") and not has_gpu:
        raise UsageError(f"--device {wanted.device}: a rank has no GPU that torch can use")
    devices = {"": ["cpu", "cuda"] if has_gpu else ["cpu"], "all": ["cpu", "cuda"]}.get(wanted.device, [wanted.device])
    found = {device: medians for device in devices if (medians := _measured_on(device, wanted, first))}
    if not found:
        raise UsageError("none of the backends works here, so there is nothing to choose from")
    policy = bench.tuned(found, str(wanted.output))
    if first:
        _write(policy, wanted.output)
    ringway.barrier()
    ringway.destroy_process_group()


def _measured_on(device: str, wanted: _Wanted, first: bool) -> Medians:
    """Nothing, if none of the backends works there."""
    from ringway.bench import tune as bench

    groups, left_out = bench.groups_of(wanted.backends or bench.CANDIDATES[device], device)
    if first:
        for name, reason in left_out.items():
            print(f"ringway tune: skipped {name} for {device}: {reason}", file=sys.stderr)
    if not groups:
        return {}
    ops, sizes = wanted.ops or list(bench.OPS), wanted.sizes or list(bench.SIZES)
    if device != "cpu":
        ops = [op for op in ops if op != "barrier"]  # it has no tensor: the group's first device decides
    steps = sum(1 if op == "barrier" else len(sizes) for op in ops)
    with _progress(steps, first) as progress:
        return bench.medians(groups, ops, sizes, wanted.rounds, progress, device)


def _unwritable(output: Path) -> str | None:
    """The reason why the file cannot be written, or None. Tests by writing a temporary file in the folder."""
    if output.is_dir():
        return "it is a folder"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=output.parent, prefix=f"{output.name}."):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _write(policy: Policy, output: Path) -> None:
    """Write atomically, so that a run that starts at the same time never reads half a table."""
    unfinished = output.with_name(output.name + f".{os.getpid()}")
    try:
        unfinished.write_text(json.dumps(policy.document(), indent=1) + "\n")
        unfinished.replace(output)
    finally:
        unfinished.unlink(missing_ok=True)
    for rule in policy.rules:
        print(f"{rule.op:24} {rule.in_words()}")
    print(f"wrote {output}; the next run loads it with RINGWAY_POLICY={output}")


@contextmanager
def _progress(steps: int, shown: bool) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), disable=not shown) as bar:
        task: Any = bar.add_task("measuring", total=steps)

        def advance(op: str, nbytes: int) -> None:
            bar.update(task, description=f"{op} {nbytes} B", advance=1)

        yield advance
