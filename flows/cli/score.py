"""The BPB check on directories, outside the pipeline."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.types import ExistingDirectory, ExistingFile
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from flows.cli.convert import read_named_base
from flows.cli.output import ERR, AsJson, emit, note, say, table

if TYPE_CHECKING:
    from flows.settings import Settings
    from storage.bases import BaseDocument
    from tasks.bpb.engine import Engine
    from tasks.bpb.protocol import Scorer
    from tasks.scoring_directories import Scored, ScoredBy

_EXIT_CODES = {"ready": 0, "quarantined": 1, "inconclusive": 1, "stopped": 3}
_BASE = "base"
_SUBJECTS = ("own", "base", "control", "margin")
_READABLE = 0o755  # for an engine that runs as another user


def _check_engine(_: object, engine: str) -> None:
    if engine not in {"auto", "reference"} and not engine.startswith(("http://", "https://")):
        raise ValueError("expected auto, reference, or an address such as http://127.0.0.1:8000")


def score(
    own: ExistingDirectory,
    /,
    *wrong: ExistingDirectory,
    base: str,
    heldout: Annotated[list[ExistingFile], Parameter(negative="", consume_multiple=True)],
    engine: Annotated[str, Parameter(validator=_check_engine)] = "auto",
    json: AsJson = False,
) -> int:
    """Score adapters on held-out text as the pipeline does, and say what it would make of the first.

    The first directory is own, the others are wrong adapters; the control is made here. All are converted into a
    temporary directory, scored in one run (base, own, control, wrong, base again), and judged by the same rules. The
    conversion is not checked (roster check does that), and nothing is recorded or served.

    ```
    roster score trained/ash --base tiny --heldout heldout/ash.jsonl
    ```

    Parameters
    ----------
    own:
        What the trainer saved, or what roster convert made of it.
    wrong:
        Adapters of other authors on the same base. Without one the control carries the verdict.
    base:
        The base's config.json, a directory that holds one, or the name of a registered base, whose policy then counts.
    heldout:
        JSON-lines files {"id", "text"} or {"id", "prompt", "text"} of the first adapter's author.
    engine:
        auto: the registered base's engine, under its lease. An address: the vLLM server there, which must be able to
        read this machine's files. reference: transformers and PEFT here, for exploring where no vLLM runs; it needs the
        base's weights, and its verdict is never ready, since it says nothing about what serves.
    """
    from flows.settings import connect_prefect, load_settings

    settings = load_settings()
    connect_prefect(settings)
    from flows.connect import verdict_thresholds
    from tasks.bpb.reference_files import read_units_file
    from tasks.scoring_directories import ScoredBy, convert_scored, score_directories, served_format

    scored_by = ScoredBy(engine) if engine in {"auto", "reference"} else ScoredBy.URL
    files = [read_units_file(str(path), path) for path in heldout]
    known = read_named_base(base)
    document = None if Path(base).exists() else _read_document(settings, base)
    with _work_folder(settings) as work:
        form = served_format(known, document, scored_by)
        scored = convert_scored((own, *wrong), known, form, work, scored_by=scored_by)
        for warning in scored.warnings:
            note(f"warning: {warning}")
        with (
            open_scorer(settings, base, document, engine, scored_by, scored) as (scorer, model),
            _prompts_progress() as progress,
        ):
            found = score_directories(
                scorer,
                scored,
                files,
                served_model=model,
                scored_by=scored_by,
                weights_digest=document.weights_digest if document else None,
                thresholds=verdict_thresholds(settings),
                stride=settings.score_stride or None,
                progress=progress,
            )
    emit(found, as_json=json, show=lambda: _show(found))
    return _EXIT_CODES.get(found["outcome"], 0)


def _read_document(settings: Settings, base: str) -> BaseDocument:
    from flows.connect import open_store
    from storage.bases import read_base

    return read_base(open_store(settings), base).document


@contextmanager
def _work_folder(settings: Settings) -> Iterator[Path]:
    """A folder for the converted adapters, beside those of the pipeline where there is one; gone at the end."""
    shared = settings.work_path if settings.work_path.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="roster-score-", dir=shared) as folder:
        Path(folder).chmod(_READABLE)
        yield Path(folder)


@contextmanager
def open_scorer(
    settings: Settings,
    base: str,
    document: BaseDocument | None,
    engine: str,
    scored_by: ScoredBy,
    scored: Scored,
) -> Iterator[tuple[Scorer, str]]:
    """What scores, and what it calls the base."""
    from tasks.scoring_directories import ScoredBy, engine_at, forget_candidates

    if scored_by is ScoredBy.REFERENCE:
        from tasks.bpb.reference_model import ReferenceModel

        yield ReferenceModel(_weights(base, document), name=_BASE), _BASE
        return
    registered = (document.engine.url or "").rstrip("/") if document else None
    if scored_by is ScoredBy.URL and engine.rstrip("/") != registered:
        note("nobody's lease is held on this engine: whoever else scores on it now disturbs")
        with engine_at(engine, timeout_s=settings.engine_timeout_s) as other:
            forget_candidates(other)
            yield other, document.served_model if document else other.served_models()[0]
        return
    with _registered_engine(settings, base, document, scored) as (known, model):
        forget_candidates(known)
        yield known, model


@contextmanager
def _registered_engine(
    settings: Settings, base: str, document: BaseDocument | None, scored: Scored
) -> Iterator[tuple[Engine, str]]:
    """A registered base's engine under its lease, if it says of itself that it can serve these adapters."""
    from flows.connect import open_store
    from tasks.engine_fit import check_engine
    from tasks.engines import leased_engine_at, read_engine
    from tasks.errors import NoEngine

    if document is None or document.engine.url is None:
        raise NoEngine(base)
    info = read_engine(open_store(settings), document.base)
    check_engine(info, document.base, document.served_model, scored.needs)
    url, wait_s, timeout_s = document.engine.url, settings.engine_wait_s, settings.engine_timeout_s
    with leased_engine_at(url, document.base, wait_s=wait_s, timeout_s=timeout_s) as engine:
        yield engine, document.served_model


def _weights(base: str, document: BaseDocument | None) -> Path:
    """The folder of the base's weights: as registered, else where its config.json lies."""
    if document is None:
        path = Path(base)
        return path if path.is_dir() else path.parent
    if document.weights is None:
        expected = (
            "the folder of the base's weights: register it with --weights, or give the folder as --base"
        )
        raise FileNotFoundError(errno.ENOENT, expected, base)
    return Path(document.weights)


@contextmanager
def _prompts_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr that names the subject that is scored; silent when stderr is no terminal."""
    columns = (
        TextColumn("scoring {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("prompts"),
    )
    with Progress(*columns, console=ERR, transient=True, disable=not ERR.is_terminal) as bar:
        shown = bar.add_task("", total=None)

        def update(label: str, done: int, total: int) -> None:
            bar.update(shown, description=label, completed=done, total=total)

        yield update


def _show_sets(sets: dict[str, Any]) -> None:
    rows = [
        (
            name,
            ", ".join((one["outcome"], *one["codes"])),
            *(None if one[subject] is None else f"{one[subject]:.4f}" for subject in _SUBJECTS),
            one["units"],
            one["bytes"],
        )
        for name, one in sets.items()
    ]
    table(("held-out set", "by itself", *_SUBJECTS, "units", "bytes"), rows, empty="no set was scored")


def _show(found: dict[str, Any]) -> None:
    """Print a verdict for people: every figure in a table, the outcome with its reason, and what there is to note."""
    bpb = {"base": found["base"], "own": found["own"], "control": found["control"]}
    bpb |= {f"wrong:{name}": value for name, value in found["wrong"].items()} | {
        "base_again": found["base_again"]
    }
    rows = []
    for label, value in bpb.items():
        one = found["differences"].get(label)
        interval = None if one is None else f"{one['lower']:+.4f} … {one['upper']:+.4f}"
        rows.append(
            (
                label,
                None if value is None else f"{value:.4f}",
                None if one is None else f"{one['mean']:+.4f}",
                interval,
                found["directories"].get(label, found["control_kind"] if label == "control" else None),
            )
        )
    table(
        ["subject", "bits per byte", "worse than own by", "interval", "what"],
        rows,
        empty="nothing was scored",
    )
    if len(found["sets"]) > 1:
        _show_sets(found["sets"])
    say(
        f"{found['units']} units, {found['bytes']} bytes, {found['tokens']} tokens in {found['seconds']:.1f} s"
    )
    for text in found["notes"]:
        note(text)
    outcome = found["outcome"] or found["would_be"]
    ruling = f"{outcome} ({', '.join(found['codes'])})" if found["codes"] else outcome
    if found["would_be"]:
        say(f"would be {ruling}: {found['reason']}")
        say(
            "never ready: the reference scorer shows what the trainer's program makes of it, not what vLLM serves"
        )
    else:
        say(f"{ruling}: {found['reason']}")
