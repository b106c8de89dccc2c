"""Feeding vLLM servers that have no resolver of ours: what to start them with, and bringing them up to the roster."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import CycloptsError, Parameter
from cyclopts.types import PositiveInt

from flows.cli.output import AsJson, emit, emit_json, note, say
from flows.cli.submit import check_url

if TYPE_CHECKING:
    from roster.feeds import EnvironmentVariable
    from roster.serving import Roster
    from tasks.pushing import Pushed

Format = Literal["json", "lora-modules", "vllm-args"]


def export(
    *,
    format: Format = "json",
    base: str | None = None,
    path_root: PurePosixPath | None = None,
    max_loras: PositiveInt | None = None,
    max_cpu_loras: PositiveInt | None = None,
    json: AsJson = False,
) -> None:
    """Print the published roster, or what a vLLM server has to be started with to serve it.

    A server with our plugin finds the authors by itself, and needs the arguments alone. Any other gets the adapters at
    its start (`lora-modules`, or `vllm-args` with --path-root), or later by `roster push`.

    ```
    roster export --format vllm-args --base tiny
    ```

    Parameters
    ----------
    format:
        json: roster/current.json as it is. lora-modules: a line for each adapter, as --lora-modules takes it.
        vllm-args: all arguments, quoted for a shell, on one line.
    base:
        Only this base; needed by the other formats where the roster has several.
    path_root:
        The folder, as the server sees it, that holds what the store's serving/ does: a mount, a copy, or what
        `roster push` filled.
    max_loras:
        Slots on the accelerator; the roster's advice if left out. `roster plan` says what fits.
    max_cpu_loras:
        Adapters kept in the host's memory; as many as there are authors, up to 16, if left out.
    """
    from flows.connect import open_store
    from flows.settings import load_settings
    from roster.feeds import RUNTIME_UPDATES, list_modules, plan_arguments, plan_environment
    from tasks.pushing import choose_base, read_roster

    settings = load_settings()
    store = open_store(settings)
    roster = read_roster(store)
    if format == "json":
        chosen = {base: choose_base(store, roster, base)} if base is not None else roster.bases
        emit_json(roster.model_copy(update={"bases": chosen}).model_dump(mode="json"))
        return
    name = base if base is not None else _only_base(roster)
    served = choose_base(store, roster, name)
    modules = list_modules(served, path_root) if path_root is not None else ()
    if format == "lora-modules":
        if path_root is None:
            raise _misuse("the server has to be told where the adapters lie: give --path-root too.")
        listed = {"base": name, "modules": [module.model_dump() for module in modules]}
        lines = "\n".join(module.model_dump_json() for module in modules)
        emit(listed, as_json=json, show=lambda: say(lines))
        return
    arguments = plan_arguments(served, modules, max_loras=max_loras, max_cpu_loras=max_cpu_loras)
    environment: Sequence[EnvironmentVariable] = [RUNTIME_UPDATES]
    if path_root is None:
        environment = plan_environment(
            name,
            endpoint=settings.store_endpoint,
            bucket=settings.store_bucket,
            region=settings.store_region,
            addressing=settings.store_addressing,
        )

    def show() -> None:
        say(shlex.join(arguments))
        needed = " ".join(f"{one.name}={shlex.quote(one.value)}" for one in environment)
        keys = "" if path_root is not None else ", and the store's keys (docs/serving.md)"
        note(f"in the server's environment: {needed}{keys}")

    document = {"base": name, "arguments": arguments, "environment": dict(environment)}
    emit(document, as_json=json, show=show)


def push(
    *,
    server: Annotated[str, Parameter(validator=check_url)],
    base: str | None = None,
    directory: Path | None = None,
    path_root: PurePosixPath | None = None,
    dry_run: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    json: AsJson = False,
) -> int:
    """Bring a vLLM server that has no plugin of ours up to the roster.

    Fetches what the server lacks into a folder that it can read, loads each author under its own name, unloads who is
    not served any more, and replaces what has changed: unloaded first, so that the author answers 404 for as long as
    the new one loads. Done twice, the second time finds nothing to do.

    ```
    roster push --server http://127.0.0.1:8000 --base tiny --dry-run
    ```

    Parameters
    ----------
    server:
        The server's address. It has to run with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 (`roster export`).
    base:
        The base that it serves; told by the name of its model if left out.
    directory:
        Where the adapters go on this machine; `pushed` in ROSTER_HOME if left out. Nothing is removed from it.
    path_root:
        The same folder as the server sees it, where that is another path.
    dry_run:
        Say what would be done, and do nothing.
    """
    from flows.cli.progress import part_progress
    from flows.connect import open_store
    from flows.settings import load_settings
    from tasks import pushing
    from tasks.bpb.engine import Engine

    settings = load_settings()
    store = open_store(settings)
    roster = pushing.read_roster(store)
    folder = (directory or settings.home / "pushed").absolute()
    with Engine(server, timeout_s=settings.engine_timeout_s) as engine:
        loaded = engine.list_adapters()
        names = {card.id for card in loaded}
        models = [name for name in engine.served_models() if name not in names]
        name = pushing.find_pushed_base(store, engine.url, models, base)
        entry = roster.bases.get(name)
        authors = entry.authors if entry is not None else {}
        if pushing.has_resolver(loaded):
            note(f"the server at {engine.url} has our plugin and follows the roster by itself")
        steps = pushing.plan_push(authors, loaded, path_root or PurePosixPath(folder))
        done: Sequence[Pushed] = [pushing.Pushed(step) for step in steps]
        if not dry_run:
            with part_progress("pushing") as progress:
                done = pushing.push(store, engine, steps, folder, told=_tell, progress=progress)
    document = {
        "server": engine.url,
        "base": name,
        "roster_version": roster.version,
        "dry_run": dry_run,
        "steps": [{**asdict(one.step), "problem": one.problem} for one in done],
    }
    emit(document, as_json=json, show=lambda: _show(done, dry_run=dry_run))
    return 1 if any(one.problem for one in done) else 0


_DOES = {
    "unload": "unloads",
    "load": "loads",
    "replace": "replaces",
    "keep": "keeps",
    "leave": "leaves alone",
}


def _tell(pushed: Pushed) -> None:
    if pushed.problem is not None:
        note(f"roster: {pushed.problem}")


def _show(done: Sequence[Pushed], *, dry_run: bool) -> None:
    for one in done:
        if one.problem is None and one.step.act != "keep":
            digest = (one.step.output_digest or "")[:12]
            say(f"{'would: ' if dry_run else ''}{_DOES[one.step.act]} {one.step.author} {digest}")
    counts = {act: sum(one.step.act == act for one in done) for act in _DOES}
    failed = sum(one.problem is not None for one in done)
    note(", ".join([*(f"{act} {count}" for act, count in counts.items()), f"failed {failed}"]))


def _only_base(roster: Roster) -> str:
    if len(roster.bases) != 1:
        known = ", ".join(roster.bases) or "none"
        raise _misuse(f"a server serves one base, the roster has {known}: name it with --base.")
    return next(iter(roster.bases))


def _misuse(message: str) -> CycloptsError:
    return CycloptsError(msg=message, command_chain=("export",))
