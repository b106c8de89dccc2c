"""Correct conversions, which no check may find fault with: random ones of every family, and trained ones."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from bench.mutation_adapters import Form, Meaning, Style, find_differences, load_base, write_source
from bench.mutation_output import read_output
from bench.mutation_training import ALPHA, RANK, World
from bench.mutation_trial import Counts, list_failures
from bench.mutation_uploads import Upload, new_upload
from tasks.lora.checks import Depth
from tasks.lora.convert import convert_adapter
from tasks.lora.errors import AdapterError
from tasks.lora.inspect import Inspection, inspect_adapter
from tasks.lora.layouts import Orientation, Packing
from tasks.lora.plan import plan_conversion
from tasks.lora.target import TargetFormat

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ENCODINGS = tuple(product(Packing, Orientation))


@dataclass(frozen=True, slots=True)
class _Source:
    """An adapter of which it is known what it means. scaling_of: what the trainer applied to each projection."""

    name: str
    found: Inspection
    meaning: Meaning
    style: Style | None

    def scaling_of(self, projection: str) -> float:
        return ALPHA / RANK if self.style is None else self.style.scaling_of(projection)


def convert_random(family: str, folder: Path, seed: int) -> Counts:
    """Convert random adapters of a family in every form and encoding to what is served; return what checks said."""
    counts, base = Counts(), load_base(family)
    forms = [(Form.STACKED, encoding) for encoding in _ENCODINGS]
    forms += [(Form.PER_EXPERT, _ENCODINGS[0]), (Form.CUBE, _ENCODINGS[0])]
    for number, (form, (packing, orientation)) in enumerate(forms, start=seed + sum(family.encode())):
        style = Style(
            form,
            packing,
            orientation,
            _DTYPES[number % 3],
            rslora=number % 5 == 0,
            patterns=number % 4 == 1,
            attention=number % 2 == 0,
        )
        name = f"{family}, {style}"
        with _emptied(folder / "correct") as work:
            meaning = write_source(work / "source", base, style, number)
            try:
                found = inspect_adapter(work / "source", base, label=name)
            except AdapterError as error:
                counts.false_alarms.append(f"{name}: {error}")
                continue
            _convert_and_check(_Source(name, found, meaning, style), work, counts)
    return counts


def convert_trained(world: World, folder: Path, counts: Counts) -> None:
    """Convert every author's adapter in every encoding, its packing told by nothing but the tensors."""
    for number, (author, (packing, orientation)) in enumerate(product(range(len(world.authors)), _ENCODINGS)):
        dtype = _DTYPES[number % 2]
        upload = new_upload(world, author)
        upload.pack(packing)
        upload.orientation, upload.dtype = orientation, dtype
        upload.pairs = {place: (a.to(dtype), b.to(dtype)) for place, (a, b) in upload.pairs.items()}
        name = f"{world.family}, {world.authors[author].name}, trained, {packing}, {orientation}, {dtype}"
        with _emptied(folder / "correct") as work:
            found = _read_trained(upload, work, name, packing, counts)
            if found is not None:
                _convert_and_check(_Source(name, found, upload.meaning(), None), work, counts)


def _read_trained(
    upload: Upload, work: Path, name: str, packing: Packing, counts: Counts
) -> Inspection | None:
    """Read it as the tensors say; as it is where they say nothing, which scores would have to decide."""
    upload.write(work / "source")
    try:
        found = upload.inspect(work / "source")
        if found.undecided:
            counts.undecided += 1
            upload.forced = packing
            found = upload.inspect(work / "source")
    except AdapterError as error:
        counts.false_alarms.append(f"{name}: {error}")
        return None
    if any(decision.value is not packing for decision in found.packing):
        counts.false_alarms.append(f"{name}: read as {found.packing[0].value}")
        return None
    return found


def _convert_and_check(source: _Source, work: Path, counts: Counts) -> None:
    """Convert to what the engine serves and check, in the two ways that there are: by probes, and by everything.

    Slots hold other numbers than the source; tests/test_lora_slots.py compares them.
    """
    counts.correct_families.add(source.found.family)
    for format in filter(
        source.found.layout.base.served.serves, (TargetFormat.PER_EXPERT, TargetFormat.STACKED)
    ):
        folder = work / format
        convert_adapter(source.found.files, plan_conversion(source.found.layout, format), folder)
        output = read_output(folder, source.found.layout.base, format)
        wrong = next(find_differences(output, source.meaning, source.scaling_of), None)
        if wrong is not None:
            counts.incorrect.append(f"{source.name}, to {format}: {wrong}")
            continue
        counts.correct += 1
        for depth in (Depth.QUICK, Depth.FULL):
            named = list_failures(folder, source.found, format, depth)
            if named:
                counts.false_alarms.append(f"{source.name}, to {format}, {depth}: {', '.join(named)}")


@contextmanager
def _emptied(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
