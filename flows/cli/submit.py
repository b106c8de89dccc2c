"""What trainers and operators hand in: adapters, bases, held-out text."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from cyclopts import Parameter
from cyclopts.types import ExistingDirectory, ExistingFile, ExistingPath

from flows.cli.output import AsJson, emit, note

_SHOWN_WARNINGS = 5


def check_url(_: object, url: str | None) -> None:
    """Refuse, as a parameter's validator, what is no server's address."""
    parts = urlsplit(url or "")
    if url is not None and not (parts.scheme in {"http", "https"} and parts.hostname):
        raise ValueError("expected the address of a server, such as http://127.0.0.1:8000")


EngineUrl = Annotated[str | None, Parameter(validator=check_url)]


def submit(
    directory: ExistingDirectory,
    /,
    *,
    author: str,
    base: str,
    run: str | None = None,
    trainer: str | None = None,
    reference: ExistingFile | None = None,
    heldout: Annotated[list[str] | None, Parameter(negative="")] = None,
    json: AsJson = False,
) -> None:
    """Upload a trained adapter and start its flow.

    Uploads adapter_config.json and the weights, the marker last, then sends the event that starts the flow. If the
    event cannot be sent, the upload still counts: the sweep finds it within a minute. To see beforehand whether the
    adapter can be read and converted: `roster inspect DIRECTORY --base BASE`.

    ```
    roster submit trained/ash --author ash --base tiny --trainer unsloth_zoo==2026.8.17
    ```

    Parameters
    ----------
    directory:
        What the trainer saved. A training.json in it is read too.
    author:
        Whose adapter it is: lower-case letters, digits, '.', '_', '-'.
    base:
        A registered base, or an alias of one (roster base add).
    run:
        This training run's name; the time of submission if left out.
    trainer:
        Trainer and version, such as unsloth_zoo==2026.8.17: evidence for the layout when the file has no marker.
    reference:
        The trainer's own scores of the held-out sets (JSON).
    heldout:
        Held-out sets to score on, as author/name; all of the author's if left out.
    """
    from flows.cli.progress import byte_progress
    from flows.connect import open_store
    from flows.events import announce_upload
    from flows.settings import load_settings
    from storage.bases import find_base, list_bases
    from tasks.submission import submit_adapter

    settings = load_settings()
    store = open_store(settings)
    if find_base(store, base) is None:
        known = ", ".join(list_bases(store)) or "none"
        note(f"warning: base {base} is not registered (there is: {known}); the adapter waits until it is")
    try:
        with byte_progress("uploading") as progress:
            upload = submit_adapter(
                store,
                directory,
                author=author,
                base=base,
                run=run,
                trainer=trainer,
                reference=reference,
                heldout=tuple(heldout or ()),
                progress=progress,
            )
    except KeyboardInterrupt:
        note("the upload was broken off: without its marker nothing of it is looked at; submit it again")
        raise
    for warning in upload.warnings:
        note(f"warning: {warning}")
    sent = announce_upload(settings, upload)
    if not sent:
        prefect = settings.prefect_api_url
        cause = (
            f"the Prefect server at {prefect} did not take it"
            if prefect
            else "ROSTER_PREFECT_API_URL is not set"
        )
        note(f"warning: the event was not sent: {cause}; the sweep finds the upload within a minute")
    marker = upload.marker
    emit(
        {
            "author": marker.author,
            "run": marker.run,
            "submission": marker.submission,
            "adapter_digest": upload.adapter_digest,
            "event_sent": sent,
        },
        as_json=json,
        show=lambda: note(
            f"submitted {marker.author}/{marker.run} for base {marker.base}; see: roster why {author}"
        ),
    )


def base_add(
    name: str,
    /,
    *,
    config: ExistingPath,
    weights: ExistingDirectory | None = None,
    engine_url: EngineUrl = None,
    served_model: str | None = None,
    alias: Annotated[list[str] | None, Parameter(negative="")] = None,
    target_format: Literal["per-expert", "stacked", "slots"] | None = None,
    engine_dtype: Literal["auto", "bfloat16", "float16", "float32"] | None = None,
    json: AsJson = False,
) -> None:
    """Register a base model: its config.json, the digest of its weights, and the engine that serves it.

    Registering a name again replaces what was said of it before, the engine's address included; aliases, the target
    format and the engine's dtype stay where none are given.

    ```
    roster base add tiny --config models/tiny --weights models/tiny --engine-url http://127.0.0.1:8000
    ```

    Parameters
    ----------
    name:
        How uploads name this base.
    config:
        Its config.json, or a directory holding one.
    weights:
        The directory with its weight files. They are read once, to know them by digest, and not uploaded; workers that
        have them under the same path compare trainers' merged checkpoints with them.
    engine_url:
        The vLLM server that scores adapters of this base, such as http://127.0.0.1:8000.
    served_model:
        What that server calls the base; the base's name if left out.
    alias:
        Other names for the same base, as trainers write them (Qwen/Qwen3-30B-A3B).
    target_format:
        The form in which its adapters are served; per-expert if it was never said. With stacked the engine needs
        --enable-mixed-moe-lora-format, unless vLLM serves this family so by nature. slots is served where per-expert
        is, by an engine with our plugin alone (docs/slots.md).
    engine_dtype:
        The --dtype that the engine is started with; auto, as the engine's own default, if it was never said. Slots are
        written in it.
    """
    from flows.cli.progress import byte_progress
    from flows.connect import open_store
    from flows.settings import load_settings
    from tasks.submission import add_base, list_sharing

    store = open_store(load_settings())
    with byte_progress("reading the weights") as progress:
        registered = add_base(
            store,
            name,
            config=config,
            weights=weights,
            engine_url=engine_url,
            served_model=served_model or name,
            aliases=tuple(alias or ()),
            target_format=target_format,
            engine_dtype=engine_dtype,
            progress=progress,
        )
    for other in list_sharing(store, name, engine_url):
        note(
            f"warning: {engine_url} is the engine of base {other} too. Runs of one would unload what runs of the other "
            "score: give each base an engine of its own"
        )
    digest = registered.digest
    emit(
        {"base": name, "digest": digest},
        as_json=json,
        show=lambda: _note_base(name, digest, registered.document.weights),
    )


def _note_base(name: str, digest: str, weights: str | None) -> None:
    note(f"registered base {name} ({digest[:12]})")
    if weights is None:
        note("without its weights: trainers' merged checkpoints are not compared (--weights DIR)")


def heldout_add(author: str, name: str, file: ExistingFile, /, *, json: AsJson = False) -> None:
    """Register held-out text for an author: JSON lines {"id", "text"} or {"id", "prompt", "text"}.

    A verdict needs at least 20 texts and 8,000 bytes, unless the settings say otherwise.

    ```
    roster heldout add ash main heldout/ash.jsonl
    ```

    Parameters
    ----------
    author:
        Whose text it is.
    name:
        This set's name.
    file:
        The JSON-lines file, UTF-8.
    """
    from flows.connect import open_store
    from flows.settings import load_settings
    from storage.heldout import register_heldout

    heldout = register_heldout(open_store(load_settings()), author, name, file)
    for warning in heldout.warnings[:_SHOWN_WARNINGS]:
        note(f"warning: {warning}")
    if len(heldout.warnings) > _SHOWN_WARNINGS:
        note(f"warning: and {len(heldout.warnings) - _SHOWN_WARNINGS} more like these")
    emit(
        {"heldout": f"{author}/{name}", "units": len(heldout.units), "sha256": heldout.sha256},
        as_json=json,
        show=lambda: note(f"registered {author}/{name}: {len(heldout.units)} units"),
    )
