"""The one table of all that was measured: docs/performance.md is made of bench/results/, and of nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance.md"
Figures = Mapping[str, Any]
Met = Callable[[Figures], bool]
_NOTHING = "-"
_HEAD = """# Performance
Everything here is written by `./run bench all` (or `./run bench all --table`) from bench/results/; what led to a
figure, and what was tried in vain, is told in bench/notes.md. *Beside* is what a user would do otherwise, or what
bounds the figure, from the same run.
"""
_FOOT = """
![seconds of inspection, conversion and quick check against the adapter's size](cost-against-size.svg)

Nothing here was measured on a GPU, and the GPU build of vLLM was not run: what is said of engines holds for vLLM on the
CPU with our plugin. Any line again: `./run bench NAME --save`. All of it: `./run bench all`.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table. measured, beside: format strings over a bench's figures `f`. met: None without a goal."""

    what: str
    measured: str
    beside: str = _NOTHING
    goal: str = _NOTHING
    met: Met | None = None


def _at_most(limit: float, *path: str) -> Met:
    return lambda figures: _find(figures, path) <= limit


def _at_least(limit: float, *path: str) -> Met:
    return lambda figures: _find(figures, path) >= limit


def _none_of(*names: str) -> Met:
    return lambda figures: not any(figures[name] for name in names)


def _all_of(*names: str) -> Met:
    return lambda figures: all(figures[name] for name in names)


def _find(figures: Any, path: tuple[str, ...]) -> float:
    for name in path:
        figures = figures[name]
    return float(figures)


def _trigger(event: str, key: str, name: str, kind: str, goal: float) -> Row:
    return Row(
        f"{event} to the first step, {name}",
        f"{{f[kinds][{kind}][{key}][median]}} s",
        f"Prefect's smallest flow {{f[kinds][{kind}][hello_to_start_s][median]}} s",
        f"{goal:g} s",
        _at_most(goal, "kinds", kind, key, "median"),
    )


def _catalog(key: str, what: str, goal: float, unit: str) -> Row:
    about = f"catalog of 10,000 authors, 3 versions each: {what}"
    return Row(about, f"{{f[{key}]}} {unit}", goal=f"{goal:g} {unit}", met=_at_most(goal, key))


ROWS: Mapping[str, tuple[Row, ...]] = {
    "packing": (
        Row(
            "packing told from an adapter's tensors",
            "{f[right]:,} right, {f[wrong]} wrong, {f[abstained]} abstained",
            "from single tensors {f[tensors][right]:,}, {f[tensors][wrong]}, {f[tensors][abstained]:,}",
            "none wrong",
            _none_of("wrong"),
        ),
    ),
    "mutations": (
        Row(
            "damages and wrong decisions named",
            "{f[caught]} of {f[mutations]}, of {f[kinds]} kinds",
            "{f[false_alarms]} alarms on {f[correct_conversions]} right conversions",
            "all; none",
            lambda figures: figures["caught"] == figures["mutations"] and not figures["false_alarms"],
        ),
    ),
    "fuzz": (
        Row(
            "{f[inputs]:,} mutated inputs: errors that are not ours, files left",
            "{f[strange_errors]}, {f[leftovers]}; {f[peak_mb]} MB",
            goal="none",
            met=_none_of("strange_errors", "leftovers"),
        ),
    ),
    "convert": (
        Row(
            "conversion, 30B shape, per expert",
            "{f[formats][per-expert][wall_s]} s, {f[peak_mb]} MB",
            "`cp` of the output {f[formats][per-expert][cp_s]} s; "
            "by hand {f[by_hand][wall_s]} s, {f[by_hand][peak_mb]} MB",
        ),
        Row(
            "the same, as a ratio",
            "{f[formats][per-expert][ratio_to_cp]}",
            "by hand {f[by_hand][ratio_to_cp]}",
            "1.3 of `cp`",
            _at_most(1.3, "formats", "per-expert", "ratio_to_cp"),
        ),
        Row(
            "inspection of it, whole process",
            "{f[inspect][inspect_s]} s",
            "header alone {f[inspect][header_only_s]} s",
        ),
    ),
    "check": (
        Row(
            "quick check of it",
            "{f[quick_s]} s, {f[quick_peak_mb]} MB",
            "full, all {f[full][pairs]:,} deltas, {f[full_s]} s, {f[full_peak_mb]} MB",
        ),
        Row(
            "{f[trials][trials]:,} seeded damages: missed by the quick check",
            "{f[trials][missed]}",
            goal="none",
            met=lambda figures: not figures["trials"]["missed"],
        ),
    ),
    "size": (
        Row(
            "seconds a GB, 2 to 96 layers, 8 to 512 experts: inspect, convert, quick check",
            "{f[lines][inspect_s][s_per_gb]}, {f[lines][convert_s][s_per_gb]}, {f[lines][check_s][s_per_gb]}",
            "`cp` of the output {f[lines][cp_s][s_per_gb]}",
            "on a line",
            _all_of("passed"),
        ),
    ),
    "score": (
        Row(
            "scoring over HTTP",
            "{f[tokens_per_s]:,} tokens/s",
            "{f[ratio_to_in_process]} of vLLM in process, {f[ratio_to_bare_loop]} of a bare loop",
        ),
    ),
    "load": (
        Row(
            "vLLM loads slots, 4 layers of the 30B shape, warm",
            "{f[slots_s]} s",
            "per-expert {f[per_expert_s]} s: {f[ratio]} times as long",
            "a quarter",
            _at_least(4, "ratio"),
        ),
        Row(
            "the same",
            "{f[slots_s]} s",
            "bare copy into the slot {f[copy_s]} s: {f[ratio_to_copy]} of it",
            "2 of the copy",
            _at_most(2, "ratio_to_copy"),
        ),
        Row("the same, cold", "{f[cold_slots_s]} s", "reading the same bytes cold {f[cold_read_s]} s"),
    ),
    "transfer": (
        Row(
            "up- and download, seconds",
            "{f[upload_s]}, {f[download_s]}",
            "one plain boto3 stream {f[plain_upload_s]}, {f[plain_download_s]}; `cp` {f[cp_s]}",
        ),
        Row(
            "an upload that was killed half way, resumed",
            "{f[resumed_s]} s",
            "{f[ratio_resumed]} of a whole one",
        ),
    ),
    "trigger": tuple(
        _trigger(event, key, name, kind, goal)
        for name, kind, goal in (
            ("long-lived runner", "long_lived_runner", 3),
            ("process worker", "process_worker", 10),
        )
        for event, key in (("event", "event_to_start_s"), ("sweep", "sweep_to_start_s"))
    ),
    "overhead": (
        Row(
            "pipeline overhead an adapter, 30B shape, long-lived runner",
            "{f[runner_overhead_s]} s",
            goal="1 s",
            met=_at_most(1, "runner_overhead_s"),
        ),
        Row(
            "the same, process worker",
            "{f[process_overhead_s]} s",
            goal="3 s",
            met=_at_most(3, "process_overhead_s"),
        ),
    ),
    "overlap": (
        Row(
            "two adapters overlapped",
            "{f[overlapped_s]} s",
            "one after the other {f[one_after_the_other_s]} s: {f[ratio]} times as long",
            "1.4 times",
            _at_least(1.4, "ratio"),
        ),
    ),
    "backlog": (
        Row(
            "{f[adapters]} tiny adapters at once, scripted scorer",
            "{f[adapters_an_hour]} an hour; {f[database_is_locked]} locks, {f[http_503]} times 503",
            goal="steady, flat",
            met=_all_of("steady", "flat"),
        ),
    ),
    "scale": (
        Row(
            "{f[adapters]:,} tiny adapters: seconds each and MiB of all parts in the last hundred",
            "{f[per_adapter_s_last_100]} s, {f[rss_mb_last]} MiB",
            "first hundred {f[per_adapter_s_first_100]} s, {f[rss_mb_first]} MiB",
            "flat",
            _all_of("steady", "flat"),
        ),
    ),
    "catalog": (
        _catalog("rebuild_s", "made anew", 90, "s"),
        _catalog("listing_s", "listed, nothing changed", 6, "s"),
        _catalog("incremental_s", "100 touched adapters", 1, "s"),
        _catalog("ready_ms", "`ready` after open", 50, "ms"),
        _catalog("show_ms", "`show` after open", 50, "ms"),
        _catalog("report_s", "report", 10, "s"),
    ),
    "chaos": (
        Row(
            "{f[adapters]} adapters under kills, faults of the store, full disks, wrong clocks",
            "lost {f[lost]}, doubled {f[doubled]}, differing {f[differing]}, orphans {f[orphans]}",
            goal="none",
            met=_none_of("lost", "doubled", "differing", "orphans"),
        ),
    ),
}


def read_results(folder: Path = RESULTS) -> dict[str, Any]:
    """The saved figures, by bench; those of benches without a row too."""
    return {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))}


def format_page(results: Mapping[str, Any]) -> str:
    """docs/performance.md, of these figures."""
    lines = ["| bench | what | measured | beside | goal | met |", "|---|---|---|---|---|---|"]
    lines += [f"| `{name}` | {' | '.join(cells)} |" for name, cells in list_rows(results)]
    missing = [f"`{name}`" for name in ROWS if name not in results]
    unmeasured = ["", f"Not measured yet: {', '.join(missing)}."] if missing else []
    return "\n".join([_HEAD, *lines, *unmeasured, "", *_format_machines(results), _FOOT])


def list_rows(results: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The lines of what was measured: the bench, and its what, measured, beside, goal, met."""
    for name, rows in ROWS.items():
        if name in results:
            # What a bench lists by name counts here.
            figures = {key: len(one) if isinstance(one, list) else one for key, one in results[name].items()}
            for row in rows:
                met = _NOTHING if row.met is None else "yes" if row.met(figures) else "**no**"
                told = (text.format(f=figures) for text in (row.what, row.measured, row.beside))
                yield name, (*told, row.goal, met)


def _format_machines(results: Mapping[str, Any]) -> Iterator[str]:
    """The machines that the figures are of, each with the benches that ran on it."""
    seen: dict[str, list[str]] = {}
    for name in ROWS:
        machine = results.get(name, {}).get("machine")
        if machine is not None:
            libraries = ", ".join(f"{library} {version}" for library, version in machine["libraries"].items())
            told = f"{machine['processor']}, {machine['cores']} shared cores, {machine['memory_gib']} GiB"
            seen.setdefault(f"{told}; Python {machine['python']}, {libraries}", []).append(name)
    for machine, benches in seen.items():
        yield f"Machine of {', '.join(benches)}: {machine}."
