"""The engine as a matrix uses it: under its lease, still the one that was planned with, one adapter at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from storage.s3 import S3Store
from tasks.bpb.engine import Engine
from tasks.bpb.measure import Subject, served
from tasks.disk import RunDisk, trim_folders
from tasks.engines import leased_engine_at, read_engine
from tasks.errors import EngineChanged, NoEngine
from tasks.job import JobLimits
from tasks.matrix_plan import Plan
from tasks.matrix_rows import Row
from tasks.opponents import candidate_name
from tasks.transfer import fetch_served

_KEPT = 24
"""Adapters that stay on this machine's disk when the matrix is through."""


@contextmanager
def leased_for(store: S3Store, plan: Plan, limits: JobLimits) -> Iterator[Engine]:
    """The base's engine under its lease, the one that was planned with, rid of what killed runs left loaded.

    Raises:
        EngineChanged: it is another one by now, or was at the end.
    """
    base = plan.base
    url = base.document.engine.url
    if url is None:
        raise NoEngine(base.name)
    with leased_engine_at(
        url, base.name, wait_s=limits.engine_wait_s, timeout_s=limits.engine_timeout_s
    ) as engine:
        _require_same(store, plan)
        for name in engine.served_models():
            if "@" in name and name != base.document.served_model:
                engine.unload(name)
        yield engine
        _require_same(store, plan)


def _require_same(store: S3Store, plan: Plan) -> None:
    now = read_engine(store, plan.base.name).engine_id
    if now != plan.info.engine_id:
        raise EngineChanged(plan.base.name, plan.info.engine_id, now)


@contextmanager
def loaded_row(
    store: S3Store, plan: Plan, limits: JobLimits, row: Row | None
) -> Iterator[tuple[Engine, str]]:
    """The leased engine with this row's adapter loaded, and what the engine calls it."""
    if row is None:
        with leased_for(store, plan, limits) as engine:
            yield engine, plan.base.document.served_model
        return
    folder = limits.work_path / "served" / plan.base.name
    digest = row.manifest.output_digest
    path = folder / row.author / digest
    disk = RunDisk(limits.work_path)
    try:
        fetch_served(store, row.manifest, disk, path)
        name = candidate_name(row.author, digest)
        subject = Subject(row.author, name, str(path), row.manifest.is_3d_lora_weight)
        with leased_for(store, plan, limits) as engine, served(engine, subject):
            yield engine, name
    finally:
        disk.close()
        trim_folders(list(folder.glob("*/*")), _KEPT)
