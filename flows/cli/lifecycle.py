"""What operators do about an author: hold, release, retire, pin, unpin."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from flows.cli.output import AsJson, emit, note, say

if TYPE_CHECKING:
    from flows.settings import Settings
    from storage.author_record import AuthorEvent
    from storage.s3 import S3Store
    from tasks.acts import Acted, Served

_SHOWN_DIGITS = 16

Reason = Annotated[str, Parameter(validator=lambda _, why: check_why(why))]
"""Why something is done; it has to be said."""


def hold(
    author: str, /, *, why: Reason, base: str | None = None, who: str | None = None, json: AsJson = False
) -> None:
    """Serve an author no more, until `roster release`. Uploads are still taken up and judged meanwhile.

    ```
    roster hold ash --why "the author asked for it"
    ```

    Parameters
    ----------
    author:
        Whose adapters.
    why:
        Your reason; `roster why` tells it.
    base:
        Only on this base; on every one if left out.
    who:
        In whose name; your own user's if left out.
    """
    _act("hold", author, base, who, why, json=json)


def release(
    author: str, /, *, base: str | None = None, who: str | None = None, why: str = "", json: AsJson = False
) -> None:
    """Undo hold and retire: what is ready is served again, and what was passed over is taken up.

    After a purge an author begins anew.

    ```
    roster release ash
    ```

    Parameters
    ----------
    author:
        Whose adapters.
    base:
        Only on this base; on every one if left out.
    who:
        In whose name; your own user's if left out.
    why:
        Your reason; `roster why` tells it.
    """
    _act("release", author, base, who, why, json=json)


def retire(
    author: str, /, *, why: Reason, base: str | None = None, who: str | None = None, json: AsJson = False
) -> None:
    """Serve an author no more, and take nothing of theirs up, until `roster release`. Every file stays.

    ```
    roster retire ash --why "left the programme"
    ```

    Parameters
    ----------
    author:
        Whose adapters.
    why:
        Your reason; `roster why` tells it.
    base:
        Only on this base; on every one if left out.
    who:
        In whose name; your own user's if left out.
    """
    _act("retire", author, base, who, why, json=json)


def pin(author: str, digest: str, /, *, who: str | None = None, why: str = "", json: AsJson = False) -> None:
    """Serve this adapter of an author on its base, whatever comes later, until `roster unpin`.

    Should its verdict not be ready any more, nobody is served in its place, and `roster why` says so.

    ```
    roster pin ash DIGEST
    ```

    Parameters
    ----------
    author:
        Whose adapter.
    digest:
        The adapter's digest, or its first 8 digits or more; `roster history AUTHOR` tells it.
    who:
        In whose name; your own user's if left out.
    why:
        Your reason; `roster why` tells it.
    """
    from flows.connect import open_store, operator_name
    from flows.settings import load_settings
    from tasks.acts import pin as pin_adapter

    settings = load_settings()
    store = open_store(settings)
    acted = pin_adapter(store, author, digest, who=who or operator_name(), why=why)
    _report(settings, store, acted, "pin", json=json)


def unpin(
    author: str, /, *, base: str | None = None, who: str | None = None, why: str = "", json: AsJson = False
) -> None:
    """Undo pin: the latest ready adapter is served again.

    ```
    roster unpin ash
    ```

    Parameters
    ----------
    author:
        Whose adapter.
    base:
        Only on this base; on every one if left out.
    who:
        In whose name; your own user's if left out.
    why:
        Your reason; `roster why` tells it.
    """
    _act("unpin", author, base, who, why, json=json)


def _act(act: str, author: str, base: str | None, who: str | None, why: str, *, json: bool) -> None:
    from flows.connect import open_store, operator_name
    from flows.settings import load_settings
    from storage.author_record import AuthorAct
    from tasks.acts import act as act_on

    settings = load_settings()
    store = open_store(settings)
    acted = act_on(store, author, AuthorAct(act), base=base, who=who or operator_name(), why=why)
    _report(settings, store, acted, act, json=json)


def _report(settings: Settings, store: S3Store, acted: Acted, act: str, *, json: bool) -> None:
    """Ask for a sync, then say what was done and what is served."""
    from tasks.acts import find_served

    author = acted.record.author
    asked = _ask_for_sync(settings) if acted.event is not None else None
    served = find_served(store, author)
    warnings = _list_hindrances(settings, acted)
    document = {
        "author": author,
        "event": None if acted.event is None else acted.event.model_dump(mode="json"),
        "sync": asked,
        "served": [{"base": one.base, "output_digest": one.output_digest} for one in served],
        "warnings": warnings,
    }

    def show() -> None:
        if acted.event is None:
            undone = "pinned" if act == "unpin" else "held or retired"
            say(f"{author}: nothing is {undone}, so there is nothing to {act}")
        else:
            say(f"{author}: {_in_words(acted.event)}, by {acted.event.who}")
        say(f"served now: {_served_in_words(served)}")
        for warning in warnings:
            note(f"warning: {warning}")
        if asked is not None:
            note(asked)

    emit(document, as_json=json, show=show)


def _list_hindrances(settings: Settings, acted: Acted) -> list[str]:
    """Why nobody will be served under a new pin, as far as the author's record and this machine's catalog tell."""
    from roster.advice import advise
    from roster.catalog import open_catalog
    from roster.errors import CatalogUnreadable, UnknownAuthor
    from storage.author_record import AuthorAct, find_standing

    event = acted.event
    if event is None or event.act is not AuthorAct.PIN:
        return []
    author, found = acted.record.author, []
    standing = find_standing(acted.record, event.base)
    if standing.held or standing.retired:
        word = "retired" if standing.retired else "on hold"
        found.append(f"{author} is {word} on {event.base}: nobody is served until `roster release {author}`")
    try:
        with open_catalog(settings.catalog_path) as reader:
            adapters, synced_at = reader.show(author).adapters, reader.synced_at()
    except (CatalogUnreadable, UnknownAuthor):
        return found
    for one in adapters:
        if one.adapter.adapter_digest == event.adapter_digest:
            found += [
                f"at the sync of {synced_at} this adapter could not be served, and nobody is in its place: "
                f"{fault.reason}. {advise(fault.code)}"
                for fault in one.faults
            ]
    return found


def _ask_for_sync(settings: Settings) -> str:
    """Have the act take effect: when it does, or what is to be done for it."""
    by_hand = "run `roster sync` for this to take effect now; the scheduled sync publishes it otherwise"
    if not settings.prefect_api_url:
        return f"no Prefect server is known here: {by_hand}"
    from flows.settings import connect_prefect

    connect_prefect(settings)
    from flows.asking import request_sync
    from flows.overview import SILENT

    try:
        # Of every ledger: a sync of some authors shares its run with whoever asked first, and does not hear of ours.
        asked = request_sync(settings.sync_window_seconds, logging.getLogger(__name__))
    except SILENT as error:
        return f"Prefect at {settings.prefect_api_url} does not answer ({error}): {by_hand}"
    if not asked:
        return f"Prefect at {settings.prefect_api_url} has no deployment to run a sync: {by_hand}"
    return f"a sync was asked for: the roster follows within about {settings.sync_window_seconds} s"


def check_why(why: str) -> None:
    """Return if a reason says anything.

    Raises:
        ValueError: it does not.
    """
    if not why.strip():
        raise ValueError("expected a reason that tells others later why this was done")


def _in_words(event: AuthorEvent) -> str:
    where = "every base" if event.base is None else f"base {event.base}"
    words = {
        "hold": f"held on {where}",
        "release": f"released on {where}",
        "retire": f"retired on {where}",
        "unpin": f"unpinned on {where}",
    }
    digest = (event.adapter_digest or "")[:_SHOWN_DIGITS]
    said = words.get(event.act.value, f"pinned to adapter {digest} on {where}")
    return f"{said}: {event.why}" if event.why else said


def _served_in_words(served: tuple[Served, ...]) -> str:
    if not served:
        return "nothing"
    return ", ".join(f"{one.output_digest[:_SHOWN_DIGITS]} on {one.base}" for one in served)
