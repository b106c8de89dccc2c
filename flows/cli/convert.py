"""Looking at and converting one adapter directory, without the pipeline."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.types import ExistingDirectory

from flows.cli.output import AsJson, emit, note, say, table

if TYPE_CHECKING:
    from tasks.directories import KnownBase

Packing = Literal["auto", "rank_major", "grouped_by_expert"]


def inspect(
    directory: ExistingDirectory,
    /,
    *,
    base: str,
    packing: Packing = "auto",
    header_only: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    json: AsJson = False,
) -> int:
    """Say what an adapter is: family, orientation, packing with every piece of evidence, coverage, problems.

    Refuses what the pipeline refuses before it scores: a rehearsal of a submission that uploads nothing. It tells all
    that is wrong, a line each: file, config, names, layout, numbers. The first decides the code.

    ```
    roster inspect trained/ash --base models/tiny
    ```

    Parameters
    ----------
    directory:
        What the trainer saved: adapter_config.json and the weights. A training.json beside them is read too.
    base:
        The base's config.json, a directory that holds one, or the name of a registered base, whose policy then counts.
    packing:
        Force a reading instead of deciding from evidence.
    header_only:
        Read no tensor data: quick, but trained fractions and digests stay unknown.
    """
    from tasks.directories import inspect_directory

    found = inspect_directory(
        directory, read_named_base(base), packing=forced_packing(packing), header_only=header_only
    )
    emit(found, as_json=json, show=lambda: show_inspection(found))
    return 0


def convert(
    source: ExistingDirectory,
    destination: Path,
    /,
    *,
    base: str,
    packing: Packing = "auto",
    format: Literal["per-expert", "stacked", "slots"] = "per-expert",
    json: AsJson = False,
) -> int:
    """Convert one adapter directory to what vLLM serves. The destination appears whole or not at all.

    ```
    roster convert trained/ash serving/ash --base models/tiny
    ```

    Parameters
    ----------
    source:
        The directory that the trainer saved.
    destination:
        A directory that does not exist yet, or is empty.
    base:
        The base's config.json, a directory that holds one, or the name of a registered base, whose policy then counts.
    packing:
        Force a reading instead of deciding from evidence.
    format:
        per-expert: one pair of factors for each expert and projection; every vLLM with MoE LoRA takes it.
        stacked: all experts in one tensor, rank_major, with the marker that says so; vLLM needs
        --enable-mixed-moe-lora-format for it, unless it serves this family so by nature.
        slots: as the engine holds them, cast to the dtype that the base is served in, and scaled; a vLLM with our
        plugin alone takes it, and loads it several times as fast (docs/slots.md).
    """
    from flows.cli.progress import byte_progress
    from tasks.directories import convert_directory

    with byte_progress("converting") as progress:
        made = convert_directory(
            source,
            destination,
            read_named_base(base),
            packing=forced_packing(packing),
            format=format,
            progress=progress,
        )

    def show() -> None:
        show_inspection(made)
        note(f"wrote {destination}: {made['pairs']} pairs, output digest {made['output_digest'][:16]}")

    emit(made, as_json=json, show=show)
    return 0


def read_named_base(named: str) -> KnownBase:
    """The sizes in a config.json, in the one of a directory, or in that of a registered base, with its policy."""
    from tasks.directories import KnownBase
    from tasks.lora.base import read_base_config

    if Path(named).exists():
        return KnownBase(read_base_config(Path(named), label=named))
    # Only for a name: the store's client takes as long to import as the headers of an adapter to read.
    from flows.connect import open_store
    from flows.settings import SettingsIncomplete, load_settings
    from storage.bases import read_base
    from storage.errors import InvalidName
    from storage.keys import check_base
    from storage.policy import find_policy

    try:
        check_base(named)
        store = open_store(load_settings())
    except InvalidName:
        raise FileNotFoundError(
            errno.ENOENT, "expected a base's config.json, found no such file", named
        ) from None
    except SettingsIncomplete as error:
        problem = f"expected a base's config.json or a registered base, found no such file, and {error}"
        raise FileNotFoundError(errno.ENOENT, problem, named) from None
    base = read_base(store, named)
    config = read_base_config(base.config, label=named, engine_dtype=base.document.engine.dtype)
    return KnownBase(config, find_policy(store, named))


def forced_packing(packing: Packing) -> str | None:
    """The reading that the option asks for, None for a decision from evidence."""
    return None if packing == "auto" else packing


def show_inspection(found: dict[str, Any]) -> None:
    """Print an inspection for people: the layout with its evidence, what was trained, and warnings."""
    say(
        f"{found['family']}: {found['layers']} layers, {found['experts']} experts, {found['format']}, "
        f"orientation {found['orientation']}, {found['pairs']} pairs when converted"
    )
    for parameter, decision in found["packing"].items():
        say(f"{parameter}: packing {decision['value']}, decided by {decision['decided_by']}")
        for packing, layers in decision.get("layers", {}).items():
            say(f"  {packing}: layers {', '.join(map(str, layers))}")
        for item in decision["evidence"]:
            says = f"says {item['says']}" if item["says"] else "tells nothing"
            say(f"  {item['source']} ({item['strength']}) {says}: {item['detail']}")
    ranks = found["ranks"]
    classes = [
        (name, c["keys"], ranks.get(name), c["trained_fraction"]) for name, c in found["classes"].items()
    ]
    table(["factors", "tensors", "rank", "trained fraction"], classes, empty="no factors")
    for warning in found["warnings"]:
        note(f"warning: {warning}")
