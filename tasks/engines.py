"""The engine that serves a base: what it says of itself, its lease, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prefect.client.orchestration import get_client
from prefect.concurrency.sync import concurrency

from roster.serving_engine import EngineInfo
from storage.documents import read_document
from storage.errors import ObjectNotFound
from storage.keys import engine_key
from tasks.bpb.engine import Engine
from tasks.bpb.engine_errors import EngineUnavailable
from tasks.errors import EngineUnfit, EngineUnverified, NoEngine
from tasks.job import Job

# A killed holder's slot is free again after this long.
_LEASE_SECONDS = 60


def read_engine_info(job: Job) -> EngineInfo | None:
    """What the engine of this base published about itself, None if it never did."""
    try:
        info, _ = read_document(job.store, engine_key(job.base.name), EngineInfo)
    except ObjectNotFound:
        return None
    return info


def require_engine(job: Job, info: EngineInfo | None, rank: int) -> EngineInfo:
    """The engine's own words, when they say that it can serve this adapter and give scores that stand.

    Raises:
        EngineUnverified: it published nothing.
        EngineUnfit: a setting is not what the adapter or the check needs; the message names it.
    """
    if info is None:
        raise EngineUnverified(job.base.name, engine_key(job.base.name))
    served = job.base.document.served_model
    needs = (
        ("--enable-lora", "on", "on" if info.enable_lora else "off"),
        ("--no-enable-prefix-caching", "given", "missing" if info.prefix_caching else "given"),
        (
            "--served-model-name",
            served,
            served if served in info.served_model else ", ".join(info.served_model),
        ),
    )
    for setting, expected, found in needs:
        if expected != found:
            raise EngineUnfit(job.base.name, setting, expected, found)
    if info.max_lora_rank < rank:
        raise EngineUnfit(job.base.name, "--max-lora-rank", f"at least {rank}", str(info.max_lora_rank))
    if info.device == "cpu" and not info.cpu_moe_plugin:
        raise EngineUnfit(job.base.name, "the plugin for expert LoRA on CPU", "active", "not loaded")
    return info


@contextmanager
def leased_engine(job: Job) -> Iterator[Engine]:
    """A client of the base's engine, while no other run scores on it.

    Raises:
        NoEngine: the base names no engine.
        EngineUnavailable: it does not answer.
        TimeoutError: the lease did not come free within `engine_wait_s`.
    """
    url = job.base.document.engine.url
    if url is None:
        raise NoEngine(job.base.name)
    with (
        engine_lease(job.base.name, job.limits.engine_wait_s),
        Engine(url, timeout_s=job.limits.engine_timeout_s) as engine,
    ):
        if not engine.is_healthy():
            raise EngineUnavailable(url, "GET /health", "no healthy answer")
        yield engine


@contextmanager
def engine_lease(base: str, wait_s: float) -> Iterator[None]:
    """The one slot of a base's engine: a Prefect concurrency limit that a dead holder loses by itself."""
    name = f"engine-{base}"
    with get_client(sync_client=True) as client:
        client.upsert_global_concurrency_limit_by_name(name, 1)
    with concurrency(name, occupy=1, timeout_seconds=wait_s, lease_duration=_LEASE_SECONDS, strict=True):
        yield
