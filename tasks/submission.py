"""What the command line hands in: an adapter with its statement, a base with its weights."""

from __future__ import annotations

import re
from pathlib import Path

from storage.bases import (
    Base,
    BaseDocument,
    BaseEngine,
    TargetFormat,
    find_base,
    list_bases,
    read_base,
    register_base,
    weights_digest,
)
from storage.documents import decode_document, format_time, utc_now
from storage.errors import InvalidName
from storage.keys import TRAINING_FILE, check_base, parse_heldout_ref
from storage.progress import Progress
from storage.s3 import S3Store
from storage.submit import submit_upload
from storage.training import Reference, Trainer, Training, parse_training
from storage.uploads import Upload, read_upload
from tasks.lora import target
from tasks.lora.base import BaseConfig, read_base_config
from tasks.lora.base_fields import BASE_CONFIG_NAME
from tasks.lora.plan import require_served


def submit_adapter(
    store: S3Store,
    directory: Path,
    *,
    author: str,
    base: str,
    run: str | None,
    trainer: str | None,
    reference: Path | None,
    heldout: tuple[str, ...],
    progress: Progress,
) -> Upload:
    """Upload a directory with what is stated about it; returns the upload as the pipeline will see it.

    What the options state is laid over the directory's own training.json, if it has one.

    Raises:
        InvalidName: a name, or `trainer` is not written as name==version.
        NameTaken, UploadRefused, UploadRaced, InvalidDocument, StoreUnavailable: see
            `storage.submit.submit_upload`.
    """
    name = format_time(utc_now()).lower().replace(":", "") if run is None else run
    stated = _stated(directory, trainer, reference, heldout)
    registered = find_base(store, base)
    marker = submit_upload(
        store,
        directory,
        author,
        name,
        registered.name if registered else base,
        training=stated,
        progress=progress,
    )
    return read_upload(store, marker.author, marker.run)


def add_base(
    store: S3Store,
    name: str,
    *,
    config: Path,
    weights: Path | None,
    engine_url: str | None,
    served_model: str,
    aliases: tuple[str, ...],
    progress: Progress,
    target_format: str | None = None,
    engine_dtype: str | None = None,
) -> Base:
    """Register a base, after its config has been understood and its weights have been read for their digest.

    Registered again it keeps its exclusions and, where none are given, its aliases, its target format, which is
    per-expert at first, and the dtype that it is served in, which is the engine's choice at first.

    Raises:
        InvalidName, UnknownFamily, InvalidBaseConfig, UnsupportedConfig: see `check_base_config`.
        NoWeights, InvalidDocument, NameTaken, StoreUnavailable: see `storage.bases`.
    """
    path = config / BASE_CONFIG_NAME if config.is_dir() else config
    known = find_base(store, name)
    before = known.document if known else None
    format = _target_format(target_format, before)
    check_base_config(name, config, format)
    document = BaseDocument(
        base=name,
        aliases=aliases or (before.aliases if before else ()),
        exclusions=before.exclusions if before else (),
        served_model=served_model,
        weights_digest=weights_digest(weights, progress) if weights else None,
        weights=str(weights.resolve()) if weights else None,
        engine=BaseEngine(url=engine_url, dtype=engine_dtype or (before.engine.dtype if before else None)),
        target_format=format,
    )
    return register_base(store, path.read_bytes(), document)


def list_sharing(store: S3Store, name: str, engine_url: str | None) -> list[str]:
    """The other bases whose engine is the same one; two bases cannot be scored by one.

    Raises InvalidDocument, StoreUnavailable, StoreNotTrusted.
    """
    if engine_url is None:
        return []
    others = (other for other in list_bases(store) if other != name)
    return [other for other in others if read_base(store, other).document.engine.url == engine_url]


def _target_format(stated: str | None, before: BaseDocument | None) -> TargetFormat:
    if stated is not None:
        return TargetFormat(stated)
    return before.target_format if before else TargetFormat.PER_EXPERT


def check_base_config(name: str, config: Path, format: TargetFormat) -> BaseConfig:
    """What a base's config says, unless it cannot be one: `config` is its config.json or the directory that holds it.

    Raises:
        InvalidName: the name breaks the naming rule.
        UnknownFamily, InvalidBaseConfig: the config is not one we can convert for.
        UnsupportedConfig: vLLM does not serve adapters of it in this form.
    """
    check_base(name)
    label = f"base {name}"
    read = read_base_config(config, label=label)
    require_served(read, target.TargetFormat(format.value), label)
    return read


def _stated(
    directory: Path, trainer: str | None, reference: Path | None, heldout: tuple[str, ...]
) -> Training | None:
    """The options as a training.json, laid over the one in the directory; None without any."""
    if trainer is None and reference is None and not heldout:
        return None
    path = directory / TRAINING_FILE
    before = parse_training(str(path), path.read_bytes())[0] if path.is_file() else Training()
    changes: dict[str, object] = {}
    if trainer is not None:
        changes["trainer"] = parse_trainer(trainer)
    if reference is not None:
        changes["reference"] = decode_document(str(reference), reference.read_bytes(), Reference)
    if heldout:
        changes["heldout"] = heldout
    for ref in heldout:
        parse_heldout_ref(ref)
    return before.model_copy(update=changes)


def parse_trainer(stated: str) -> Trainer:
    """The program that a statement names; a wrong spelling would lose its evidence without a word.

    Raises:
        InvalidName: it is not written as name or name==version.
    """
    match = re.fullmatch(r"([A-Za-z][\w.-]*)(?:==(\d[\w.+-]*))?", stated)
    if match is None:
        raise InvalidName("trainer", stated, "name==version, such as unsloth_zoo==2026.8.17")
    return Trainer(name=match[1], version=match[2])
