"""The engine that serves a base: what it says of itself, its lease, and whether it fits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from prefect.client.orchestration import get_client
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectAlreadyExists

from roster.serving_engine import EngineInfo
from storage.documents import read_document
from storage.errors import InvalidDocument, ObjectNotFound
from storage.keys import engine_key
from storage.qualifications import read_qualification
from storage.s3 import S3Store
from tasks.bpb.engine import Engine
from tasks.bpb.engine_errors import EngineUnavailable
from tasks.engine_fit import EngineNeeds, check_engine
from tasks.errors import (
    EngineChanged,
    EngineNotQualified,
    EngineUnverified,
    LeaseLost,
    LeaseNotGranted,
    NoEngine,
)
from tasks.job import Job

# A killed holder's slot is free again after this long.
_LEASE_SECONDS = 60


UNVERIFIED = "none"
"""The id of an engine that has not told what it is."""


def published_engine_id(job: Job) -> str:
    """The id of the engine that serves this base now, UNVERIFIED if it told nothing that we understand."""
    info = published_engine(job)
    return info.engine_id if info else UNVERIFIED


def published_engine(job: Job) -> EngineInfo | None:
    """What the engine that serves this base says of itself, None if nothing that we understand."""
    try:
        return read_engine(job.store, job.base.name)
    except EngineUnverified:
        return None


def require_same_engine(job: Job, engine_id: str) -> None:
    """Return if the engine of this base is still the one of this id.

    Raises:
        EngineChanged: it is another one by now.
    """
    now = published_engine_id(job)
    if now != engine_id:
        raise EngineChanged(job.base.name, engine_id, now)


def require_engine(job: Job, needs: Sequence[EngineNeeds]) -> EngineInfo:
    """What the engine says of itself, if that is that it can serve these adapters and give scores that stand.

    Raises:
        EngineUnverified: it published nothing, or nothing that we understand.
        EngineUnfit, EngineTooOld: see `tasks.engine_fit.check_engine`.
        EngineNotQualified: it can, but nobody has shown that it does, or it was shown that it does not.
    """
    info = read_engine(job.store, job.base.name)
    check_engine(info, job.base.name, job.base.document.served_model, needs)
    require_qualified(job.store, job.base.name, info.engine_id)
    return info


@contextmanager
def leased_engine(job: Job, offer: Callable[[str], None]) -> Iterator[Engine]:
    """A client of the base's engine, while no other run scores on it; `offer` as of `tasks.bpb.engine.Engine`.

    Raises:
        NoEngine: the base names no engine.
        EngineUnavailable: it does not answer.
        LeaseNotGranted, LeaseLost: see `engine_lease`.
    """
    url = job.base.document.engine.url
    if url is None:
        raise NoEngine(job.base.name)
    limits = job.limits
    with leased_engine_at(
        url, job.base.name, wait_s=limits.engine_wait_s, timeout_s=limits.engine_timeout_s, offer=offer
    ) as engine:
        yield engine


@contextmanager
def leased_engine_at(
    url: str, base: str, *, wait_s: float, timeout_s: float, offer: Callable[[str], None] | None = None
) -> Iterator[Engine]:
    """The same for the engine at this address; `timeout_s` seconds for one request.

    Raises:
        EngineUnavailable, LeaseNotGranted, LeaseLost: as above.
    """
    with engine_lease(base, wait_s), Engine(url, timeout_s=timeout_s, offer=offer) as engine:
        if not engine.is_healthy():
            raise EngineUnavailable(url, "GET /health", "no healthy answer")
        yield engine


@contextmanager
def engine_lease(base: str, wait_s: float) -> Iterator[None]:
    """The one slot of a base's engine: a Prefect concurrency limit that a dead holder loses by itself.

    Raises:
        LeaseNotGranted: the slot did not come free within `wait_s` seconds, or Prefect could not give it.
        LeaseLost: it could not be renewed while the block ran, which was broken off for that.
    """
    name = f"engine-{base}"
    # Prefect looks, then makes it: of the first two runs of a new base, one may find it made meanwhile.
    with get_client(sync_client=True) as client, suppress(ObjectAlreadyExists):
        client.upsert_global_concurrency_limit_by_name(name, 1)
    granted = False
    try:
        with concurrency(name, occupy=1, timeout_seconds=wait_s, lease_duration=_LEASE_SECONDS, strict=True):
            granted = True
            yield
    except (TimeoutError, ConcurrencySlotAcquisitionError) as error:
        if granted:
            raise
        raise LeaseNotGranted(base, name, str(error)) from error
    except asyncio.CancelledError as error:
        # How Prefect stops the thread whose lease it could not renew; nothing else here cancels anything.
        raise LeaseLost(base, name) from error


def read_engine(store: S3Store, base: str) -> EngineInfo:
    """What the engine that serves a base says of itself.

    Raises:
        EngineUnverified: nothing, or nothing that we understand.
    """
    key = engine_key(base)
    try:
        return read_document(store, key, EngineInfo)[0]
    except ObjectNotFound as error:
        raise EngineUnverified(base, key, "nothing") from error
    except InvalidDocument as error:
        raise EngineUnverified(base, key, error.reason) from error


def require_qualified(store: S3Store, base: str, engine_id: str) -> None:
    """Return if the engine of this id has passed its qualification for a base.

    Raises:
        EngineNotQualified: there is none, or it was not passed.
    """
    try:
        found = read_qualification(store, base, engine_id)
    except InvalidDocument as error:
        raise EngineNotQualified(base, engine_id, f"one that cannot be read: {error}") from error
    if found is None:
        raise EngineNotQualified(base, engine_id, "none")
    if not found.passed:
        failed = "; ".join(f"{check.name}: {check.found}" for check in found.failures)
        raise EngineNotQualified(base, engine_id, f"one that failed: {failed}")
