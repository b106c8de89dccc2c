"""The qualification of an engine: the gates on adapters made for its base, and a sample of the roster scored again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from secrets import token_hex

from roster.serving import AdapterFormat
from roster.serving_engine import EngineInfo
from storage.bases import Base, read_base
from storage.documents import utc_now
from storage.errors import UnknownBase
from storage.qualifications import EngineCheck, Qualification, SampledScore, write_qualification
from storage.s3 import S3Store
from tasks.bpb.engine import Engine
from tasks.disk import RunDisk
from tasks.engine_fit import EngineNeeds, check_engine
from tasks.engine_gates import run_gates
from tasks.engines import leased_engine_at, read_engine
from tasks.errors import EngineChanged, NoEngine
from tasks.gate_adapters import MARK
from tasks.gate_parts import GateSetting, Made, Recipe, Say
from tasks.lora.base import BaseConfig, read_base_config
from tasks.lora.base_fields import BASE_CONFIG_NAME
from tasks.lora.diagnostic import DiagnosticSite, list_sites, write_diagnostic
from tasks.lora.family import TensorClass
from tasks.lora.target import TargetFormat
from tasks.roster_sample import choose_sample, compare_sample, score_again
from tasks.served import served_by_engine

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class ServedBase:
    """A base, registered or not yet, and the engine that serves it. model: what that calls it."""

    name: str
    config: bytes
    model: str
    url: str
    registered: Base | None


@dataclass(frozen=True, slots=True)
class QualifyLimits:
    """See `flows.settings.Settings`. work_path: a folder that the engine can read at the same place."""

    work_path: Path
    engine_wait_s: float
    engine_timeout_s: float
    score_stride: int


def find_served_base(
    store: S3Store, name: str, *, config: Path | None, engine_url: str | None, served_model: str | None
) -> ServedBase:
    """A base by what is given here and, for the rest, by its registration, which an unregistered one can do without.

    Raises:
        UnknownBase: it is not registered, and no config is given.
        NoEngine: no address of an engine is given, or registered.
        InvalidName, InvalidDocument, StoreUnavailable: see `storage.bases.read_base`.
        OSError: the config cannot be read.
    """
    try:
        registered = read_base(store, name)
    except UnknownBase:
        if config is None:
            raise
        registered = None
    body = b"" if registered is None else registered.config
    if config is not None:
        body = (config / BASE_CONFIG_NAME if config.is_dir() else config).read_bytes()
    url = engine_url or (registered.document.engine.url if registered else None)
    if url is None:
        raise NoEngine(name)
    return ServedBase(
        name=name,
        config=body,
        model=served_model or (registered.document.served_model if registered else name),
        url=url,
        registered=registered,
    )


def qualify_engine(
    store: S3Store, base: ServedBase, limits: QualifyLimits, *, sample: int, say: Say
) -> Qualification:
    """Measure the engine that serves a base, under its lease, and store what was found, passed or not.

    sample: how many served adapters of the base to score again. say: gets one line of progress at a time.

    Raises:
        EngineUnverified, EngineUnfit: it has not told what it is, or lacks a setting without which nothing is scored.
        EngineChanged: it was restarted as another one meanwhile.
        EngineUnavailable, EngineProtocolError: it does not answer as it should.
        LeaseNotGranted, LeaseLost: see `tasks.engines.engine_lease`.
        UnknownFamily, InvalidBaseConfig, StoreUnavailable, OSError.
    """
    config = read_base_config(base.config, label=base.name)
    info = read_engine(store, base.name)
    check_engine(info, base.name, base.model, [_least_needs(base.name)])
    started, began = utc_now(), time.monotonic()
    disk = RunDisk(limits.work_path)
    try:
        with leased_engine_at(
            base.url, base.name, wait_s=limits.engine_wait_s, timeout_s=limits.engine_timeout_s
        ) as engine:
            checks = _run_gates(engine, info, config, base.model, disk, say)
            sampled = _sample(store, base, engine, info, limits, disk, sample if _passed(checks) else 0, say)
    finally:
        disk.close()
    now = read_engine(store, base.name)
    if now.engine_id != info.engine_id:
        raise EngineChanged(base.name, info.engine_id, now.engine_id)
    if sampled:
        checks = (*checks, compare_sample(sampled))
    found = Qualification(
        base=base.name,
        engine_id=info.engine_id,
        vllm_version=info.vllm_version,
        device=info.device,
        dtype=info.dtype,
        passed=_passed(checks),
        checks=checks,
        sample=sampled,
        measured_at=started,
        seconds=round(time.monotonic() - began, 1),
        tool_version=metadata.version("adapter-roster"),
    )
    write_qualification(store, found)
    return found


def _run_gates(
    engine: Engine, info: EngineInfo, config: BaseConfig, model: str, disk: RunDisk, say: Say
) -> tuple[EngineCheck, ...]:
    sites = _list_sites(info, config)
    if not any(sites.values()):
        found = (
            "of the base's modules the engine takes factors for none; start it without --lora-target-modules"
        )
        return (EngineCheck(name="loads", passed=False, found=found, figures={}),)
    setting = GateSetting(
        model=model,
        dtype=info.dtype,
        vocab=config.vocab,
        slots=info.max_loras,
        cached=info.max_cpu_loras,
        length=info.max_model_len,
        max_rank=info.max_lora_rank,
        classes={format: _list_classes(found) for format, found in sites.items() if found},
    )
    folder = disk.folder()
    folder.chmod(0o755)  # the engine may run as another user
    seed = token_hex(4)

    def make(recipe: Recipe) -> Made:
        path = folder / f"diagnostic-{recipe.number}"
        write_diagnostic(
            path,
            sites[recipe.format],
            format=recipe.format,
            rank=recipe.rank,
            dtype=_DTYPES.get(info.lora_dtype, "F32"),
            seed=f"{recipe.number}",
            strengths=recipe.strengths,
        )
        return Made(f"{MARK}{seed}-{recipe.number}", str(path), recipe.format is TargetFormat.STACKED)

    return run_gates(engine, setting, make, say)


def _list_sites(info: EngineInfo, config: BaseConfig) -> dict[TargetFormat, tuple[DiagnosticSite, ...]]:
    """Where adapters can change the base, for each form that the engine takes and its class serves right."""
    taken = {
        TargetFormat.PER_EXPERT: bool(info.expert_projections),
        TargetFormat.STACKED: info.stacked_experts,
    }
    formats = [format for format, is_taken in taken.items() if is_taken and config.served.serves(format)]
    # Of an engine that is spread over a pipeline only the first stage has told its modules.
    served = served_by_engine(info) if info.pipeline_parallel_size == 1 else None
    # One that wraps no experts takes adapters of the other modules all the same.
    return {format: list_sites(config, format, served) for format in formats or [TargetFormat.PER_EXPERT]}


def _list_classes(sites: Sequence[DiagnosticSite]) -> tuple[TensorClass, ...]:
    """The classes of these sites, routed experts first."""
    return tuple(kind for kind in TensorClass if any(site.kind is kind for site in sites))


def _least_needs(base: str) -> EngineNeeds:
    """What anything that is scored needs, whatever its rank and form."""
    return EngineNeeds(f"anything on {base}", AdapterFormat.PER_EXPERT, 1, mixed_format=False, minimum=None)


def _sample(
    store: S3Store,
    base: ServedBase,
    engine: Engine,
    info: EngineInfo,
    limits: QualifyLimits,
    disk: RunDisk,
    most: int,
    say: Say,
) -> tuple[SampledScore, ...]:
    if base.registered is None:
        return ()
    chosen = choose_sample(store, base.name, info.engine_id, most)
    return tuple(
        score_again(
            store,
            base.registered,
            engine,
            info,
            one,
            disk=disk,
            path=limits.work_path / "served" / base.name / one.author / one.output_digest,
            model=base.model,
            stride=limits.score_stride or None,
            say=say,
        )
        for one in chosen
    )


def _passed(checks: Sequence[EngineCheck]) -> bool:
    return all(check.passed for check in checks)


def summarize(found: Qualification) -> str:
    """One line: what came of it, and what to do where it failed."""
    head = f"engine {found.engine_id} of base {found.base} (vLLM {found.vllm_version}, {found.device}, {found.dtype})"
    if found.passed:
        return f"{head} is qualified: {len(found.checks)} checks passed in {found.seconds:.0f} s"
    failed = "; ".join(f"{check.name}: {check.found}" for check in found.failures)
    return (
        f"{head} is NOT QUALIFIED: {failed}. Adapters of this base stop as engine_unverified; mend the engine "
        f"(docs/engine.md), then run `roster qualify --base {found.base}`"
    )


def figures_of(check: EngineCheck) -> str:
    """The figures of a check in one cell of a table."""
    return ", ".join(f"{name} {value:.3g}" for name, value in check.figures.items())
