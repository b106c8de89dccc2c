"""Submits the adapter when training ends: a callback for transformers' Trainer, and for what is built on it.

    trainer.add_callback(SubmitAdapter(author="ash", base="tiny"))

A machine that only trains needs boto3, pydantic and pydantic-settings beside what it trains with: no Prefect, no
catalog. See docs/trainers.md.
"""

from __future__ import annotations

import logging
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from flows.connect import open_store
from flows.events import announce_upload
from flows.settings import SettingsIncomplete, load_settings, require_store
from storage.documents import format_time, utc_now
from storage.errors import StorageError
from storage.keys import check_author, check_run, parse_heldout_ref
from tasks.submission import parse_trainer, submit_adapter

LOG = logging.getLogger(__name__)

_CONFIG = "adapter_config.json"
_UNSLOTH, _PEFT = "unsloth_zoo", "peft"
_FAULTS = (StorageError, SettingsIncomplete, ValidationError, OSError)


class SubmitAdapter(TrainerCallback):
    """Saves the trained adapter under the output directory when training ends, and submits it.

    The world's first process does it. A failure then is logged, with the command that submits the saved adapter by
    hand, and never ends the training program.
    """

    def __init__(
        self,
        *,
        author: str,
        base: str,
        run: str | None = None,
        heldout: tuple[str, ...] = (),
        trainer: str | None = None,
    ) -> None:
        """Take what `roster submit` takes, and find out before training what cannot work.

        run: the time of submission if left out. heldout: sets to score on, as author/name; all of the author's if
        left out. trainer: what trains, as name==version; if left out, the unsloth_zoo that this process has loaded
        when training ends, else its PEFT.

        Raises:
            InvalidName: a name breaks its rule.
            SettingsIncomplete: the environment names no object store.
            ValidationError: a ROSTER_ variable holds what it cannot.
        """
        self._author, self._base = check_author(author), base
        self._run = None if run is None else check_run(run)
        self._heldout = tuple(heldout)
        for ref in self._heldout:
            parse_heldout_ref(ref)
        if trainer is not None:
            parse_trainer(trainer)
        self._trainer = trainer
        require_store(load_settings())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save and submit the adapter of `kwargs["model"]`, the model as training left it."""
        if not state.is_world_process_zero:
            return
        run = self._run or format_time(utc_now()).lower().replace(":", "")
        folder = Path(str(args.output_dir)) / f"adapter-{run}"
        model = kwargs["model"]
        obstacle = _find_obstacle(model)
        if obstacle is not None:
            self._tell(folder, run, f"not saved: {obstacle}")
            return
        try:
            model.save_pretrained(str(folder))
        except (OSError, SafetensorError) as error:
            self._tell(folder, run, f"not saved: {error}. Try trainer.save_model, which saves it elsewhere")
            return
        own = (
            folder / _active_adapters(model)[0]
        )  # PEFT's place for every adapter that is not called "default"
        saved = own if (own / _CONFIG).is_file() else folder
        try:
            self._submit(saved, run)
        except _FAULTS as error:
            self._tell(saved, run, f"saved, but not submitted: {error}")

    def _submit(self, folder: Path, run: str) -> None:
        settings = load_settings()
        upload = submit_adapter(
            open_store(settings),
            folder,
            author=self._author,
            base=self._base,
            run=run,
            trainer=self._trainer or _find_trainer(),
            reference=None,
            heldout=self._heldout,
            progress=lambda done, total: None,
        )
        for warning in upload.warnings:
            LOG.warning("%s", warning)
        if announce_upload(settings, upload):
            LOG.info("%s/%s is submitted; roster why %s tells how it fares", self._author, run, self._author)
        else:
            LOG.warning(
                "%s/%s is submitted, but no Prefect server took the event: the sweep finds it within minutes",
                self._author,
                run,
            )

    def _tell(self, folder: Path, run: str, what: str) -> None:
        command = [
            "roster",
            "submit",
            str(folder),
            "--author",
            self._author,
            "--base",
            self._base,
            "--run",
            run,
        ]
        command += ["--trainer", self._trainer or _find_trainer()]
        for ref in self._heldout:
            command += ["--heldout", ref]
        LOG.error(
            "the adapter of %s/%s is %s\nOnce that is mended and the adapter lies in %s, submit it by hand: %s",
            *(self._author, run, what, folder, shlex.join(command)),
        )


def _find_obstacle(model: Any) -> str | None:
    """Why this process cannot save the model's one adapter by itself, and what can; None if it can."""
    if not getattr(model, "peft_config", None):
        return "the model has no PEFT adapter"
    active = _active_adapters(model)
    if len(active) != 1:
        return (
            f"{len(active)} of its adapters are active ({', '.join(active)}), where one is submitted. "
            "Save the one with model.save_pretrained(…, selected_adapters=[…])"
        )
    # Source: deepspeed runtime/zero/partition_parameters.py (ds_id); torch distributed/tensor/_api.py (device_mesh).
    parts = any(hasattr(one, "ds_id") or hasattr(one, "device_mesh") for one in model.parameters())
    if parts or any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        return (
            "the model is spread over several processes, which have to save it together. "
            "Call trainer.save_model in all of them"
        )
    return None


def _active_adapters(model: Any) -> list[str]:
    """A property of PEFT's models, a method of transformers' own."""
    active = model.active_adapters
    return list(active() if callable(active) else active)


def _find_trainer() -> str:
    """What trained in this process, as name==version: unsloth_zoo packs by its own rule where it is loaded."""
    name = _UNSLOTH if _UNSLOTH in sys.modules else _PEFT
    try:
        return f"{name}=={metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return name
