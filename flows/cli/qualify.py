"""Measuring an engine before its scores are trusted."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import ExistingPath, NonNegativeInt

from flows.cli.output import AsJson, emit, note, table
from flows.cli.submit import EngineUrl


def qualify(
    *,
    base: str,
    config: ExistingPath | None = None,
    engine_url: EngineUrl = None,
    served_model: str | None = None,
    sample: NonNegativeInt = 3,
    new_only: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    json: AsJson = False,
) -> int:
    """Measure the engine that serves a base, and store whether its scores may be trusted.

    With small random adapters made for the base: each loads and changes the answers; two of them and the base, asked
    at once, answer as when asked alone, in both orders, with all slots full and after some had to give way; and the
    base is untouched after all. Then served adapters of the base are scored again. Until an engine has passed, adapters
    stop as engine_unverified. `roster up` does this for the engine that it starts.

    ```
    roster qualify --base tiny
    ```

    Parameters
    ----------
    base:
        The base whose engine is measured.
    config:
        Its config.json, or a directory holding one; the registered one if left out.
    engine_url:
        The engine's address; the registered one if left out.
    served_model:
        What the engine calls the base; as registered, else the base's name, if left out.
    sample:
        So many served adapters of the base are scored again, and compared with their verdicts.
    new_only:
        Do nothing where this engine has passed already.
    """
    from flows.connect import open_store
    from flows.settings import connect_prefect, load_settings

    settings = load_settings()
    connect_prefect(settings)
    store = open_store(settings)
    from storage.qualifications import read_qualification
    from tasks.engines import read_engine
    from tasks.qualification import QualifyLimits, figures_of, find_served_base, qualify_engine, summarize

    served = find_served_base(store, base, config=config, engine_url=engine_url, served_model=served_model)
    found = read_qualification(store, base, read_engine(store, base).engine_id) if new_only else None
    if found is None or not found.passed:
        limits = QualifyLimits(
            work_path=settings.work_path,
            engine_wait_s=settings.engine_wait_s,
            engine_timeout_s=settings.engine_timeout_s,
            score_stride=settings.score_stride,
        )
        found = qualify_engine(store, served, limits, sample=sample, say=note)

    def show() -> None:
        table(
            ("check", "result", "found", "figures"),
            [
                (one.name, "passed" if one.passed else "FAILED", one.found, figures_of(one))
                for one in found.checks
            ],
            empty="no check was made",
        )
        note(summarize(found))

    emit(found.model_dump(mode="json", by_alias=True), as_json=json, show=show)
    return 0 if found.passed else 1
