"""How the engines are that serve the registered bases: at their address, and by what they have told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from roster.serving_engine import EngineInfo
from storage.bases import list_bases, read_base
from storage.errors import InvalidDocument, UnknownBase
from storage.qualifications import read_qualification
from storage.s3 import S3Store
from tasks.bpb.engine import Engine
from tasks.bpb.engine_errors import EngineProtocolError, EngineUnavailable
from tasks.engines import read_engine
from tasks.errors import EngineUnverified


class Qualified(StrEnum):
    """What was measured of an engine."""

    PASSED = "passed"
    FAILED = "failed"
    NEVER = "never"  # nobody has measured this engine; or it has not told what it is
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """The engine of one base, as it can be seen from here.

    `answers`: a live engine is at `url`; None where there is no address to ask. `problem` says what is wrong with its
    address, its answer, or engine.json. `engine_id` and `vllm_version` are as published; None where nothing is.
    `current`: the engine at the address is the one that published itself; None where that cannot be told.
    `untested` is what of its way of serving nobody has verified.
    """

    base: str
    url: str | None
    answers: bool | None
    engine_id: str | None
    vllm_version: str | None
    current: bool | None
    qualified: Qualified
    failures: tuple[str, ...]
    untested: tuple[str, ...]
    problem: str | None


def look_at_engines(
    store: S3Store, embedded: Mapping[str, str], *, timeout_s: float
) -> tuple[EngineHealth, ...]:
    """The engine of every registered base, by base, each asked for at most `timeout_s` seconds a request.

    `embedded` are engines that run here, base to address: their address counts before the registered one.

    Raises:
        StoreUnavailable, StoreNotTrusted.
    """
    names = sorted({*list_bases(store), *embedded})
    return tuple(_look_at(store, name, embedded.get(name), timeout_s) for name in names)


def _look_at(store: S3Store, base: str, embedded: str | None, timeout_s: float) -> EngineHealth:
    problems = []
    url = embedded
    if url is None:
        try:
            url = read_base(store, base).document.engine.url
        except (InvalidDocument, UnknownBase) as error:
            problems.append(str(error))
        else:
            if url is None:
                problems.append("no address is registered")
    info: EngineInfo | None = None
    try:
        info = read_engine(store, base)
    except EngineUnverified as error:
        problems.append(f"{error.key} in the store holds {error.found}")
    qualified, failures = _qualification(store, base, info)
    answers, current = None, None
    if url is not None:
        answers, current, problem = _ask(url, info, timeout_s)
        problems += [problem] if problem else []
    return EngineHealth(
        base=base,
        url=url,
        answers=answers,
        engine_id=info.engine_id if info else None,
        vllm_version=info.vllm_version if info else None,
        current=current,
        qualified=qualified,
        failures=failures,
        untested=info.untested if info else (),
        problem="; ".join(problems) or None,
    )


def _ask(url: str, info: EngineInfo | None, timeout_s: float) -> tuple[bool, bool | None, str | None]:
    """Whether an engine lives at an address, whether it is the published one, and what is wrong with it."""
    with Engine(url, timeout_s=timeout_s) as engine:
        try:
            if not engine.is_healthy():
                return False, None, f"no healthy engine answers at {url}"
            if info is None:
                return True, None, None
            models, length = engine.served_models(), engine.max_model_len()
        except (EngineUnavailable, EngineProtocolError) as error:
            return True, None, str(error)
    if set(info.served_model).isdisjoint(models):
        served = ", ".join(models) or "nothing"
        return True, False, f"{url} serves {served}, but {', '.join(info.served_model)} was published"
    if length != info.max_model_len:
        return True, False, f"{url} takes {length} tokens, but {info.max_model_len} was published"
    return True, True, None


def _qualification(store: S3Store, base: str, info: EngineInfo | None) -> tuple[Qualified, tuple[str, ...]]:
    if info is None:
        return Qualified.NEVER, ()
    try:
        found = read_qualification(store, base, info.engine_id)
    except InvalidDocument as error:
        return Qualified.UNREADABLE, (str(error),)
    if found is None:
        return Qualified.NEVER, ()
    failures = tuple(f"{check.name}: {check.found}" for check in found.failures)
    return (Qualified.PASSED if found.passed else Qualified.FAILED), failures
