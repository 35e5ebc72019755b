"""`ringway env`: what was discovered, from where, and which backend would be picked and why."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from ringway.backends.select import RankFacts
    from ringway.launch.discover import Seen
    from ringway.launch.info import LaunchInfo

_PLACE = ("rank", "size", "local_rank", "local_size", "node_rank", "address", "port", "hosted_by_launcher")


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of the configuration.")] = False,
) -> None:
    """Show the launcher, the configuration and the backends, and where each comes from."""
    from ringway.config import schema as configuration_schema

    if schema:
        print(json.dumps(configuration_schema(), indent=2))
    elif as_json:
        print(json.dumps(report(), indent=2))
    else:
        _print(report())


def report() -> dict[str, Any]:
    """Everything that `ringway env` shows. Nothing connects, so only the launcher says which ranks share a host."""
    from ringway.backends.select import CONSIDERED, decide, obstacle
    from ringway.config import SETTINGS, resolve
    from ringway.errors import DiscoveryError, RingwayError
    from ringway.launch.ancestry import ancestors
    from ringway.launch.discover import all_seen, explore

    settings = resolve()
    document: dict[str, Any] = {
        "config": {key: {"value": settings.value(key), "source": settings.source(key)} for key in SETTINGS},
        "notes": list(settings.notes),
        "backends": {},
    }
    if settings.policy is not None:
        document["policy"] = _policy(settings.policy)
    for name in CONSIDERED:
        what = obstacle(name)
        document["backends"][name] = {"available": what is None, **(asdict(what) if what else {})}
    try:
        found = explore()
    except DiscoveryError as error:
        seen = [_seen(entry) for entry in all_seen(os.environ, ancestry=ancestors)]
        return document | {"launcher": None, "error": str(error), "seen": seen}
    document["launcher"] = {"source": found.info.source, **{key: getattr(found.info, key) for key in _PLACE}}
    document["launcher"]["notes"] = list(found.info.notes)
    document["seen"] = [_seen(entry) for entry in found.seen]
    document["seen"][0]["chosen"] = True
    try:
        choice = decide(settings.backend, settings.source("backend"), found.info, _rank_facts(found.info))
        document["choice"] = asdict(choice)
    except RingwayError as error:
        document["choice"] = {"backend": None, "reason": str(error)}
    return document


def _rank_facts(info: LaunchInfo) -> dict[int, RankFacts]:
    """What the ranks would report to each other, as far as the launcher says where they are."""
    from ringway.backends.select import RankFacts, obstacles
    from ringway.launch.gpus import gpu_of_rank

    lacking, width = obstacles(), info.local_size
    if width is None:
        return {rank: RankFacts(rank == 0, lacking) for rank in range(min(info.size, 2))}
    return {
        rank: RankFacts(rank < width, lacking, host=f"host {rank // width}", gpu=gpu_of_rank(rank % width))
        for rank in range(info.size)
    }


def _seen(entry: Seen) -> dict[str, Any]:
    return {
        "source": entry.source,
        "chosen": False,
        "error": str(entry.error) if entry.error else None,
        "rank": entry.info.rank if entry.info else None,
        "size": entry.info.size if entry.info else None,
    }


def _policy(given: Any) -> dict[str, Any]:
    """The policy table that mixes backends, or its error."""
    from ringway.backends.several import policy
    from ringway.errors import ConfigError

    try:
        table = policy.load(given)
    except ConfigError as error:
        return {"error": str(error)}
    rules = [{"op": rule.op, "backend": rule.in_words()} for rule in table.rules]
    return {"source": table.source, "world_size": table.world_size, "rules": rules}


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if document["launcher"] is None:
        console.print(f"Launcher: {document['error']}")
    if document["seen"]:
        console.print(_launcher_table(document))
    console.print(_backend_table(document))
    console.print(_config_table(document))
    if document.get("policy"):
        console.print(_policy_table(document["policy"]))
    if document.get("choice"):
        choice = document["choice"]
        console.print(f"Would pick: {choice['backend'] or 'nothing'} ({choice['reason']})")
    for note in document["notes"]:
        console.print(f"Note: {note}")


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _launcher_table(document: dict[str, Any]) -> Table:
    from rich.text import Text

    table = _table("Launcher", "seen", "rank", "size", "remark")
    place = document["launcher"]
    for seen in document["seen"]:
        remark = seen["error"] or ""
        if seen["chosen"]:
            facts = [f"{key.replace('_', ' ')} {place[key]}" for key in _PLACE[2:7] if place[key] is not None]
            remark = "used: " + ", ".join([*facts, *place["notes"]])
        rank, size = ("" if seen[key] is None else str(seen[key]) for key in ("rank", "size"))
        table.add_row(*map(Text, (seen["source"], rank, size, remark)))
    return table


def _backend_table(document: dict[str, Any]) -> Table:
    from rich.text import Text

    table = _table("Backends", "name", "here", "why not")
    for name, facts in document["backends"].items():
        why = ". ".join(filter(None, (facts.get("reason"), facts.get("remedy"))))
        table.add_row(*map(Text, (name, "yes" if facts["available"] else "no", why)))
    return table


def _policy_table(policy: dict[str, Any]) -> Table | str:
    from rich.text import Text

    if "error" in policy:
        return f"Policy: {policy['error']}"
    table = _table(f"Policy for {policy['world_size']} ranks, from {policy['source']}", "op", "backend")
    for rule in policy["rules"]:
        table.add_row(Text(rule["op"]), Text(rule["backend"]))
    return table


def _config_table(document: dict[str, Any]) -> Table:
    from rich.text import Text

    table = _table("Configuration", "key", "value", "from")
    for key, entry in document["config"].items():
        table.add_row(*map(Text, (key, str(entry["value"]), entry["source"])))
    return table
