"""Running the embedded services, and keeping the catalog up to date."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from cyclopts import Group, Parameter, validators
from cyclopts.types import ExistingDirectory, PositiveInt

from flows.cli.output import AsJson, emit, note, say

_SERVED = Group("A base to serve (both or neither)", validator=validators.all_or_none)

AllowDrop = Annotated[bool, Parameter(negative="", show_default=False)]


def up(
    *,
    base: Annotated[str | None, Parameter(group=_SERVED)] = None,
    weights: Annotated[ExistingDirectory | None, Parameter(group=_SERVED)] = None,
    max_model_len: PositiveInt = 2048,
    max_loras: PositiveInt = 4,
    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 16,
    target_format: Literal["per-expert", "stacked", "slots"] = "per-expert",
    json: AsJson = False,
) -> None:
    """Start the embedded services: object store, Prefect server, worker and, with --base, a vLLM engine.

    They go on in the background until `roster down`; if one dies too often, all are stopped. Their state, logs and
    data lie in ROSTER_HOME (.roster here unless set). Everything listens on 127.0.0.1 only.

    ```
    roster up --base tiny --weights models/tiny
    ```

    Parameters
    ----------
    base:
        Serve this base for scoring, and register it.
    weights:
        The base's Hugging Face directory: config.json, weights, tokenizer.
    max_model_len:
        The engine's context in tokens; held-out texts that are longer are scored in windows.
    max_loras:
        Adapter slots of the engine.
    max_lora_rank:
        The largest adapter rank to serve.
    target_format:
        The form in which the base's adapters are served. The engine is started so that it takes all, unless
        per-expert ones or slots are asked for and need no flag.
    """
    from flows.embedded import start_detached
    from flows.settings import base_environment, load_settings
    from flows.up import embedded_config, register_served_base

    settings = load_settings()
    config = embedded_config(
        settings,
        base=base,
        weights=weights,
        max_model_len=max_model_len,
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        target_format=target_format,
    )
    services = start_detached(config, environment=base_environment(), announce=note)
    note("everything goes on in the background; stop it with: roster down")
    if base is not None and weights is not None:
        register_served_base(load_settings(), services, base, weights, target_format)
    document = {
        "prefect": services.prefect.ui_url,
        "store": services.store.endpoint,
        "engines": services.engines,
        "home": str(settings.home),
    }

    def show() -> None:
        say(f"prefect: {services.prefect.ui_url}")
        say(f"store: {services.store.endpoint}")
        for served, address in services.engines.items():
            say(f"engine of {served}: {address}")
        say(f"home: {settings.home}")

    emit(document, as_json=json, show=show)


def down(*, json: AsJson = False) -> None:
    """Stop the embedded services of this home; what they stored stays."""
    from flows.embedded import stop_embedded
    from flows.settings import Settings

    # The bare settings: services.json may be damaged, and its error tells people to come here.
    stopped = stop_embedded(Settings().home, timeout_s=90)
    emit(
        {"stopped": stopped is not None},
        as_json=json,
        show=lambda: note(f"stopped in {stopped.seconds:.0f} s" if stopped else "nothing was running"),
    )


def sync(*, allow_drop: AllowDrop = False, json: AsJson = False) -> None:
    """Bring this machine's catalog up to date with the ledger, and publish the roster.

    Parameters
    ----------
    allow_drop:
        Publish even if many authors would be dropped from the roster at once.
    """
    _sync(allow_drop=allow_drop, rebuild=False, json=json)


def rebuild(*, allow_drop: AllowDrop = False, json: AsJson = False) -> None:
    """Make the catalog anew from the whole ledger, and publish the roster.

    Parameters
    ----------
    allow_drop:
        Publish even if many authors would be dropped from the roster at once.
    """
    _sync(allow_drop=allow_drop, rebuild=True, json=json)


def _sync(*, allow_drop: bool, rebuild: bool, json: bool) -> None:
    from flows.connect import open_store, sync_limits
    from flows.settings import load_settings
    from tasks.cataloguing import sync_catalog

    settings = load_settings()
    limits = sync_limits(settings)
    if allow_drop:
        limits = replace(limits, max_drop=1.0)
    synced = sync_catalog(open_store(settings), settings.catalog_path, limits, rebuild=rebuild)
    report = synced.report
    version = synced.roster.version if synced.roster else None
    document = {
        "added": report.added,
        "changed": report.changed,
        "removed": report.removed,
        "total": report.total,
        "rebuilt": report.rebuilt,
        "unreadable": list(report.unreadable),
        "roster_version": version,
        "published": synced.published,
    }

    def show() -> None:
        if report.rebuilt:
            note(f"the catalog was built anew: {report.rebuilt}")
        for fault in report.unreadable:
            note(f"unreadable: {fault}")
        note(
            f"{report.added} new, {report.changed} changed, {report.removed} gone, {report.total} in all; "
            f"roster version {version or 'none'}{', published' if synced.published else ', unchanged'}"
        )

    emit(document, as_json=json, show=show)
