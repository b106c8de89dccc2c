"""What the command line hands in: an adapter with its statement, a base with its weights."""

from __future__ import annotations

from pathlib import Path

from storage.bases import Base, BaseDocument, BaseEngine, TargetFormat, register_base, weights_digest
from storage.documents import decode_document, format_time, utc_now
from storage.keys import TRAINING_FILE
from storage.progress import Progress
from storage.s3 import S3Store
from storage.submit import submit_upload
from storage.training import Reference, Trainer, Training, parse_training
from storage.uploads import Upload, read_upload
from tasks.lora.base import read_base_config


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
        InvalidName, NameTaken, UploadRefused, UploadRaced, InvalidDocument, StoreUnavailable: see
            `storage.submit.submit_upload`.
    """
    name = run or format_time(utc_now()).lower().replace(":", "")
    stated = _stated(directory, trainer, reference, heldout)
    marker = submit_upload(store, directory, author, name, base, training=stated, progress=progress)
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
) -> Base:
    """Register a base, after its config has been understood and its weights have been read for their digest.

    Raises:
        UnknownFamily, InvalidBaseConfig: the config is not one we can convert for.
        NoWeights, InvalidDocument, NameTaken, StoreUnavailable: see `storage.bases`.
    """
    path = config / "config.json" if config.is_dir() else config
    read_base_config(path, label=f"base {name}")
    document = BaseDocument(
        base=name,
        aliases=aliases,
        served_model=served_model,
        weights_digest=weights_digest(weights, progress) if weights else None,
        engine=BaseEngine(url=engine_url),
        target_format=TargetFormat.PER_EXPERT,
    )
    return register_base(store, path.read_bytes(), document)


def _stated(
    directory: Path, trainer: str | None, reference: Path | None, heldout: tuple[str, ...]
) -> Training | None:
    """The options as a training.json, laid over the one in the directory; None without any."""
    if not (trainer or reference or heldout):
        return None
    path = directory / TRAINING_FILE
    before = parse_training(str(path), path.read_bytes())[0] if path.is_file() else Training()
    changes: dict[str, object] = {}
    if trainer:
        program, _, version = trainer.partition("==")
        changes["trainer"] = Trainer(name=program, version=version or None)
    if reference:
        changes["reference"] = decode_document(str(reference), reference.read_bytes(), Reference)
    if heldout:
        changes["heldout"] = heldout
    return before.model_copy(update=changes)
