"""What the reference scorer reads beside the model: held-out files, the base's digest, what an adapter says of itself.

It is read as the pipeline reads it, so that both name and measure the same; the trainer's side has no store.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from tasks.bpb.heldout import HeldoutUnits, Unit
from tasks.bpb.reference_errors import AdapterNotRead, HeldoutFileInvalid, ModelUnusable, PackingUnstated

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}/[a-z0-9][a-z0-9._-]{0,63}")
_SUFFIX = ".jsonl"
_PIECE = 1 << 25
_SHOWN = 200
_MIXED = "mixed"
CONFIG_NAME, TRAINING_NAME = "adapter_config.json", "training.json"


class ExpertPacking(StrEnum):
    """How the columns of a stacked lora_B belong to experts: column j to expert j mod E, or to expert j // rank."""

    RANK_MAJOR = "rank_major"
    GROUPED_BY_EXPERT = "grouped_by_expert"


@dataclass(frozen=True, slots=True)
class HeldoutFile:
    """One held-out set read from a file, and the sha256 of its bytes."""

    heldout: HeldoutUnits
    sha256: str


@dataclass(frozen=True, slots=True)
class StatedPacking:
    """What an adapter says of its packing, and where.

    by_parameter: the last part of a stacked parameter's name, and its packing. otherwise: that of the others, None
    where nothing is said of them.
    """

    by_parameter: tuple[tuple[str, ExpertPacking], ...] = ()
    otherwise: ExpertPacking | None = None

    def of(self, parameter: str) -> ExpertPacking | None:
        """The packing of one stacked parameter, such as down_proj; None if nothing is said."""
        return dict(self.by_parameter).get(parameter, self.otherwise)


class _HeldoutLine(BaseModel):
    model_config = ConfigDict(frozen=True)

    id: str
    prompt: str | None = None
    text: str

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        for field in ("id", "prompt", "text"):
            value = getattr(self, field)
            if value is not None and not value.strip():
                raise ValueError(f"{field} is empty")
        return self


def read_heldout_file(argument: str) -> HeldoutFile:
    """The set in a file, given as `<author>/<name>=FILE`, or as a path that ends in `<author>/<name>.jsonl`.

    Raises:
        HeldoutFileInvalid: no name can be told, or a line is not what a registered set may hold.
        OSError: the file cannot be read.
    """
    named, separator, file = argument.partition("=")
    if not (separator and _NAME.fullmatch(named)):
        path = Path(argument)
        named, file = f"{path.absolute().parent.name}/{path.name.removesuffix(_SUFFIX)}", argument
    if not _NAME.fullmatch(named):
        advice = (
            "Give it as AUTHOR/NAME=FILE, under the name it is registered by: small letters, digits, . _ -"
        )
        raise HeldoutFileInvalid(argument, "the name of a held-out set", repr(named[:_SHOWN]), advice)
    return read_units_file(named, Path(file))


def read_units_file(name: str, path: Path) -> HeldoutFile:
    """The set in a file, under any name.

    Raises:
        HeldoutFileInvalid: a line is not what a registered set may hold.
        OSError: the file cannot be read.
    """
    body = path.read_bytes()
    return HeldoutFile(HeldoutUnits(name, _parse_units(str(path), body)), hashlib.sha256(body).hexdigest())


def _parse_units(file: str, body: bytes) -> tuple[Unit, ...]:
    units: dict[str, Unit] = {}
    for number, line in enumerate(body.split(b"\n"), start=1):
        if not line.strip():
            continue
        at = f"{file}, line {number}"
        unit = _parse_line(at, line)
        if unit.id in units:
            raise HeldoutFileInvalid(at, "each id once", f"{unit.id!r} again", "Give each unit its own id.")
        units[unit.id] = Unit(unit.id, unit.text, unit.prompt)
    if not units:
        advice = 'Each line is a unit, such as {"id": "1", "text": "..."}.'
        raise HeldoutFileInvalid(file, "units", "none", advice)
    return tuple(units.values())


def _parse_line(at: str, line: bytes) -> _HeldoutLine:
    expected = '{"id", "text"} or {"id", "prompt", "text"} in UTF-8 without a byte order mark'
    advice = "Correct the line; the pipeline refuses it in the same way."
    try:
        if line.startswith(b"\xef\xbb\xbf"):
            raise HeldoutFileInvalid(at, expected, "a byte order mark", advice)
        line.decode()
        return _HeldoutLine.model_validate_json(line)
    except UnicodeDecodeError as error:
        raise HeldoutFileInvalid(at, expected, str(error), advice) from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        found = f"{'.'.join(map(str, first['loc']))} {first['msg']}".strip()[:_SHOWN]
        raise HeldoutFileInvalid(at, expected, found, advice) from error


def digest_weights(directory: Path, progress: Callable[[int, int], None]) -> str:
    r"""The weights_digest of a base: sha256 over the lines `<sha256> <name>\n` of its weight files, sorted by name.

    These are its safetensors, or its *.bin files where it has none; all are read. progress: bytes done and in all.

    Raises:
        ModelUnusable: it has neither.
        OSError: a file cannot be read.
    """
    paths = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))
    if not paths:
        advice = "Give the directory that holds the base's weights (a hub's copy: `hf download NAME --local-dir DIR`)."
        raise ModelUnusable(str(directory), "*.safetensors or *.bin files", "none", advice)
    total = sum(path.stat().st_size for path in paths)
    whole, done = hashlib.sha256(), 0
    piece = memoryview(bytearray(min(_PIECE, max(1, total))))
    for path in paths:
        one = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(piece):
                one.update(piece[:count])
                done += count
                progress(done, total)
        whole.update(f"{one.hexdigest()} {path.name}\n".encode())
    return whole.hexdigest()


def read_stated_packing(directory: Path) -> StatedPacking:
    """What an adapter states of its packing: the marker in its config, else the training.json beside it.

    Source: unsloth_zoo 2026.9.6 temporary_patches/moe_utils.py, which writes the marker nested, flat or inside
    auto_mapping, and "mixed" where a summary has no one answer.

    Raises:
        AdapterNotRead: what it states is no packing.
        PackingUnstated: a parameter's layers differ: PEFT has one reading for all of them.
    """
    config = _read_object(directory / CONFIG_NAME) or {}
    automatic = config.get("auto_mapping")
    by_parameter: dict[str, ExpertPacking] = {}
    otherwise: list[ExpertPacking] = []
    for holder in (config, automatic if isinstance(automatic, dict) else {}):
        nested = holder.get("unsloth_fused_expert_lora")
        nested = nested if isinstance(nested, dict) else {}
        parameters = nested.get("parameters")
        for name, detail in (parameters if isinstance(parameters, dict) else {}).items():
            said = detail.get("lora_B_layout") if isinstance(detail, dict) else None
            if said == _MIXED:
                raise _differs(f"{directory}/{CONFIG_NAME}: {name}")
            if said is not None:
                by_parameter.setdefault(name, _parse_packing(said, directory / CONFIG_NAME))
        for said in (nested.get("lora_B_layout"), holder.get("lora_B_layout")):
            if said is not None and said != _MIXED:
                otherwise.append(_parse_packing(said, directory / CONFIG_NAME))
    if by_parameter or otherwise:
        return StatedPacking(tuple(by_parameter.items()), otherwise[0] if otherwise else None)
    said = (_read_object(directory / TRAINING_NAME) or {}).get("lora_B_layout")
    if isinstance(said, dict):
        each = ((name, _parse_packing(one, directory / TRAINING_NAME)) for name, one in said.items())
        return StatedPacking(tuple(each))
    return StatedPacking(otherwise=None if said is None else _parse_packing(said, directory / TRAINING_NAME))


def read_peft_version(directory: Path) -> str | None:
    """The PEFT that an adapter's config says it was saved by; PEFT itself takes its own version where there is none.

    Raises:
        AdapterNotRead: the config is no JSON object.
    """
    version = (_read_object(directory / CONFIG_NAME) or {}).get("peft_version")
    return version if isinstance(version, str) else None


def _differs(where: str) -> PackingUnstated:
    advice = "Bring it into one packing with `roster migrate`, and score that."
    return PackingUnstated(where, "one packing", "layers that differ", advice)


def _parse_packing(said: object, path: Path) -> ExpertPacking:
    try:
        return ExpertPacking(str(said))
    except ValueError:
        expected, found = " or ".join(ExpertPacking), repr(said)[:_SHOWN]
        raise AdapterNotRead(
            f"{path}: lora_B_layout", expected, found, "Correct it, or remove the file's field."
        ) from None


def _read_object(path: Path) -> dict[str, Any] | None:
    try:
        said = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise AdapterNotRead(str(path), "JSON", str(error), "Copy the trainer's file again.") from error
    if not isinstance(said, dict):
        advice = "Copy the trainer's file again."
        raise AdapterNotRead(str(path), "a JSON object", type(said).__name__, advice)
    return said
