"""A base's or a merged model's weights: which tensor holds what an adapter changes, read one expert at a time.

Experts are stored fused (all in one tensor of three dimensions) or one by one, under transformers' names or the
original ones; both are in the family's row. Source: transformers 5.24 conversion_mapping.py, which save_pretrained
reverts unless told otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open

from tasks.lora.base import BaseConfig
from tasks.lora.errors import ReferenceInvalid, WeightsIncomparable
from tasks.lora.family import ExpertParameter, StoredAs
from tasks.lora.header import MAX_HEADER_BYTES
from tasks.lora.names import ModuleKey, find_module
from tasks.lora.strict_json import parse_strict_json

INDEX_NAME = "model.safetensors.index.json"
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types whose numbers are the weights; those of quantised checkpoints are not."""

_MOST_NUMBERS = 1 << 24


class _Index(BaseModel):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class Weights:
    """A checkpoint's folder. label: the adapter looked at. name, advice: for messages. places: tensor to file."""

    label: str
    name: str
    advice: str
    directory: Path
    places: Mapping[str, str]

    def invalid(self, where: str, expected: str, found: str) -> ReferenceInvalid:
        """Return the error for a fault of this checkpoint."""
        return ReferenceInvalid(self.label, f"{self.name}: {where}", expected, found, self.advice)


def open_weights(directory: Path, *, label: str, name: str, advice: str = "") -> Weights:
    """Return where each tensor of a checkpoint lies: by its index, without one in whichever *.safetensors has it.

    label: the adapter that is looked at. name: what messages call the checkpoint. advice: what they say to do, where it
    is not to merge again. Reads headers only. Raises ReferenceInvalid where there are no safetensors, where the index
    leads out of the folder, or one is damaged.
    """
    found = Weights(label, name, advice, directory, {})
    index = directory / INDEX_NAME
    if index.is_file():
        return Weights(label, name, advice, directory, _read_index(index, found))
    places: dict[str, str] = {}
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise found.invalid("its folder", "*.safetensors", "none")
    for path in files:
        with _opened(path, found) as file:
            places |= dict.fromkeys(file.keys(), path.name)
    return Weights(label, name, advice, directory, places)


def _read_index(path: Path, weights: Weights) -> dict[str, str]:
    size = path.stat().st_size
    if size > MAX_HEADER_BYTES:
        raise weights.invalid(INDEX_NAME, f"at most {MAX_HEADER_BYTES} bytes", f"{size} bytes")
    try:
        places = _Index.model_validate(parse_strict_json(path.read_bytes())).weight_map
    except ValidationError as error:
        found = error.errors(include_url=False)[0]["msg"]
        raise weights.invalid(INDEX_NAME, "weight_map: {tensor: file}", found) from error
    except ValueError as error:
        raise weights.invalid(INDEX_NAME, "strict JSON", str(error)) from error
    for name in sorted(set(places.values())):
        if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            expected = "names of safetensors files beside the index"
            raise weights.invalid(INDEX_NAME, expected, repr(name)[:200])
    return places


class WeightReader:
    """Reads tensors of a checkpoint whose files are open, each into memory of its own."""

    def __init__(self, weights: Weights, stack: ExitStack) -> None:
        """Made by `read_weights`, which also closes the files; each is opened when it is first needed."""
        self.weights = weights
        self._stack = stack
        self._files: dict[str, Any] = {}

    def has(self, name: str) -> bool:
        """Return whether there is such a tensor."""
        return name in self.weights.places

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises ReferenceInvalid where it cannot be read."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return a tensor's type as safetensors calls it. Raises ReferenceInvalid where it cannot be read."""
        return str(self._slice(name).get_dtype())

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """Return a tensor, or one part along its first axis. Raises ReferenceInvalid where it cannot be read."""
        found = self._slice(name)
        with _readable(self.weights, name):
            value: torch.Tensor = found[:] if index is None else found[index]
        return value

    def iterate(self, name: str) -> Iterator[torch.Tensor]:
        """Yield a tensor's rows, some millions of numbers at a time. Raises ReferenceInvalid if it cannot be read."""
        shape, rows = self.shape(name), self._slice(name)
        if not shape:  # which cannot be sliced
            with _readable(self.weights, name):
                number: torch.Tensor = self._files[self.weights.places[name]].get_tensor(name)
            yield number
            return
        step = max(1, _MOST_NUMBERS // max(1, math.prod(shape[1:])))
        for first in range(0, shape[0], step):
            with _readable(self.weights, name):
                part: torch.Tensor = rows[first : first + step]
            yield part

    def _slice(self, name: str) -> Any:
        file = self.weights.places[name]
        if file not in self._files:
            self._files[file] = self._stack.enter_context(
                _opened(self.weights.directory / file, self.weights)
            )
        with _readable(self.weights, name):
            return self._files[file].get_slice(name)


@contextmanager
def read_weights(weights: Weights) -> Iterator[WeightReader]:
    """Yield a reader of a checkpoint's files, closed afterwards."""
    with ExitStack() as stack:
        yield WeightReader(weights, stack)


@contextmanager
def _opened(path: Path, weights: Weights) -> Iterator[Any]:
    with ExitStack() as stack:
        with _readable(weights, path.name):
            file = stack.enter_context(safe_open(path, framework="pt"))
        yield file


@contextmanager
def _readable(weights: Weights, where: str) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        # Its own message may hold a path of this machine.
        found = str(error).replace(str(weights.directory), "its folder")[:200]
        raise weights.invalid(where, "a safetensors file that can be read", found) from error


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """Where a checkpoint holds one parameter of a layer's experts.

    fused: the one tensor of three dimensions, (experts, in, out) where `transposed`; "" where each expert has its own.
    single: projection to the names of the experts' own tensors (out, in).
    """

    parameter: ExpertParameter
    fused: str
    transposed: bool
    single: Mapping[str, tuple[str, ...]]

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor that holds a part of it."""
        return (
            (self.fused,) if self.fused else tuple(name for names in self.single.values() for name in names)
        )

    def read(self, reader: WeightReader, expert: int) -> dict[str, torch.Tensor]:
        """Return one expert's projections, each (out, in), in the stored dtype. Raises ReferenceInvalid."""
        if not self.fused:
            return {projection: reader.read(names[expert]) for projection, names in self.single.items()}
        whole = reader.read(self.fused, expert)
        if self.transposed:
            whole = whole.T
        count = len(self.parameter.projections)
        size = len(whole) // count
        return {
            projection: whole[place::count]
            if self.parameter.interleaved
            else whole[place * size : (place + 1) * size]
            for place, projection in enumerate(self.parameter.projections)
        }


def find_experts(
    reader: WeightReader, base: BaseConfig, layer: int, parameter: ExpertParameter
) -> StoredExperts | None:
    """Return where a checkpoint holds a parameter of a layer's experts; None where it has no such tensors.

    Raises ReferenceInvalid for tensors of another shape than the base's, WeightsIncomparable for quantised ones.
    """
    family = base.family
    stems = [
        f"{decoder}{template.format(layer=layer)}"
        for decoder in _decoders(base)
        for template in dict.fromkeys((family.experts, family.served_experts))
    ]
    for stem in stems:
        for fused in (f"{stem}.{parameter.name}", f"{stem}.{parameter.name}.weight"):
            if reader.has(fused):
                transposed = _is_transposed(reader, fused, base, parameter)
                shape = _fused_shape(base, parameter, transposed=transposed)
                _check(reader, fused, shape)
                return StoredExperts(parameter, fused, transposed, {})
    for stem in stems:
        for spelt in dict.fromkeys((parameter.projections, parameter.served, parameter.numbered)):
            names = {
                projection: tuple(f"{stem}.{expert}.{word}.weight" for expert in range(base.experts))
                for projection, word in zip(parameter.projections, spelt, strict=True)
            }
            found = StoredExperts(parameter, "", False, names)
            if any(map(reader.has, found.names)):
                _check_single(reader, found, base)
                return found
    return None


def find_module_weight(reader: WeightReader, base: BaseConfig, key: ModuleKey) -> str | None:
    """Return the tensor (out, in) of an ordinary module; None where the checkpoint has no such tensor.

    Raises ReferenceInvalid for one of another shape than the base's, WeightsIncomparable for a quantised one.
    """
    module = find_module(key, base)
    for decoder in _decoders(base):
        for template in dict.fromkeys((*module.sources, module.served)):
            name = f"{decoder}{template.format(layer=key.layer)}.weight"
            if reader.has(name):
                _check(reader, name, (base.size(module.out_size), base.size(module.in_size)))
                return name
    return None


def _decoders(base: BaseConfig) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*base.family.decoders, *(served.decoder for served in base.family.served))))


def _is_transposed(reader: WeightReader, fused: str, base: BaseConfig, parameter: ExpertParameter) -> bool:
    """By its shape; where in = out by its sibling's, and where that is square too as transformers stores them."""
    stem = fused.removesuffix(".weight").removesuffix(parameter.name)
    ending = ".weight" * fused.endswith(".weight")
    for one in (parameter, *base.family.parameters):
        straight, transposed = (_fused_shape(base, one, transposed=turned) for turned in (False, True))
        name = f"{stem}{one.name}{ending}"
        if straight != transposed and reader.has(name):
            return reader.shape(name) == transposed
    return base.family.stored is not StoredAs.OUT_IN


def _fused_shape(base: BaseConfig, parameter: ExpertParameter, *, transposed: bool) -> tuple[int, ...]:
    inside, out = base.size(parameter.in_size), base.size(parameter.out_size)
    return (base.experts, inside, out) if transposed else (base.experts, out, inside)


def _check_single(reader: WeightReader, found: StoredExperts, base: BaseConfig) -> None:
    size = base.size(found.parameter.out_size) // len(found.parameter.projections)
    for name in found.names:
        if not reader.has(name):
            raise reader.weights.invalid(name, "one tensor for each expert", "no such tensor")
        _check(reader, name, (size, base.size(found.parameter.in_size)))


def _check(reader: WeightReader, name: str, shape: tuple[int, ...]) -> None:
    if reader.dtype(name) not in FLOATS:
        raise WeightsIncomparable(reader.weights.name, name, f"{reader.dtype(name)}, as of a quantised model")
    if reader.shape(name) != shape:
        raise reader.weights.invalid(
            name, f"shape {shape}, as its base has it", f"shape {reader.shape(name)}"
        )
