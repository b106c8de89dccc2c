"""From settings to the things that flows and commands hold: a store, limits, this worker's name."""

from __future__ import annotations

import os
import pwd
import socket
from typing import TYPE_CHECKING

from flows.settings import Settings, require_store
from storage.s3 import S3Store
from tasks.bpb.rulings import Thresholds
from tasks.job import JobLimits

if TYPE_CHECKING:
    from tasks.cataloguing import SyncLimits


def open_store(settings: Settings) -> S3Store:
    """The object store that the settings name; nothing is contacted yet.

    Raises:
        SettingsIncomplete: they name none.
    """
    return _open(settings, hurried=False)


def open_store_hurried(settings: Settings) -> S3Store:
    """The same store, given up within seconds where it does not answer.

    Raises:
        SettingsIncomplete: they name none.
    """
    return _open(settings, hurried=True)


def _open(settings: Settings, *, hurried: bool) -> S3Store:
    require_store(settings)
    secret = settings.store_secret_key
    return S3Store.open(
        endpoint=settings.store_endpoint,
        bucket=settings.store_bucket,
        region=settings.store_region,
        access_key=settings.store_access_key,
        secret_key=secret.get_secret_value() if secret else None,
        addressing_style=settings.store_addressing,
        hurried=hurried,
    )


def sync_limits(settings: Settings) -> SyncLimits:
    """The part of the settings that a sync needs."""
    from tasks.cataloguing import SyncLimits  # brings DuckDB, which most commands do without

    return SyncLimits(settings.max_opponents, settings.max_drop, settings.serve_stale)


def job_limits(settings: Settings) -> JobLimits:
    """The part of the settings that the steps of a run need."""
    return JobLimits(
        work_path=settings.work_path,
        merged_root=settings.merged_root,
        max_opponents=settings.max_opponents,
        thresholds=verdict_thresholds(settings),
        score_stride=settings.score_stride,
        engine_timeout_s=settings.engine_timeout_s,
        engine_wait_s=settings.engine_wait_s,
        claim_seconds=settings.claim_seconds,
        check_depth=settings.check_depth,
        ablation=settings.ablation,
    )


def verdict_thresholds(settings: Settings) -> Thresholds:
    """The part of the settings that a verdict is decided by."""
    return Thresholds(
        floor=settings.floor_bpb,
        min_units=settings.min_units,
        min_bytes=settings.min_bytes,
        noise_factor=settings.noise_factor,
        drift_limit=settings.drift_limit_bpb,
        max_voided_fraction=settings.max_voided_fraction,
        confidence=settings.confidence,
        resamples=settings.resamples,
        reference_tolerance=settings.reference_tolerance_bpb,
    )


def worker_name() -> str:
    """Host and process id: which worker a step ran on."""
    return f"{socket.gethostname()}:{os.getpid()}"


def operator_name() -> str:
    """The user who gives an order on the command line; no machine's name, which is nobody's business in a bucket."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user often has no name
        return str(os.getuid())
