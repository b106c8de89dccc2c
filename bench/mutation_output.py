"""A converted adapter in memory, taken apart by meaning so that it can be damaged, and written down as it was."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tasks.lora.base import BaseConfig
from tasks.lora.files import CONFIG_NAME, WEIGHTS_NAME
from tasks.lora.names import ExpertKey, Factor, StackedKey, format_served_key
from tasks.lora.target import TargetFormat

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Place:
    """One projection of one expert of one layer."""

    layer: int
    expert: int
    projection: str


@dataclass(slots=True)
class Output:
    """A converted adapter. tensors: in the file's order. spoil: what is done to the folder after it was written."""

    base: BaseConfig
    format: TargetFormat
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    spoil: Callable[[Path], None] | None = None

    def copy(self) -> Output:
        """Return one of its own to change."""
        tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        return Output(self.base, self.format, tensors, json.loads(json.dumps(self.config)))

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers with routed experts."""
        return self.base.sparse_layers

    @property
    def projections(self) -> list[str]:
        """Every projection of the family's experts."""
        return [name for parameter in self.base.family.parameters for name in parameter.projections]

    def places(self) -> Iterator[Place]:
        """Yield every projection of every expert."""
        for layer in self.layers:
            for projection in self.projections:
                yield from (Place(layer, expert, projection) for expert in range(self.base.experts))

    def name_of(self, place: Place, factor: Factor) -> str:
        """Return the tensor that holds a factor."""
        key: ExpertKey | StackedKey
        if self.format is TargetFormat.PER_EXPERT:
            key = ExpertKey(place.layer, place.expert, place.projection, factor)
        else:
            parameter = self.base.family.parameter_of(place.projection)
            key = StackedKey(place.layer, parameter.name, factor)
        return format_served_key(key, self.base)

    def view(self, place: Place, factor: Factor) -> Tensor:
        """Return a view of A (rank, in) or B (out, rank); what is written to it is written to the adapter."""
        tensor = self.tensors[self.name_of(place, factor)]
        if self.format is TargetFormat.PER_EXPERT:
            return tensor
        experts = self.base.experts
        if factor is Factor.A:
            return tensor.view(experts, -1, tensor.shape[1])[place.expert]
        parameter = self.base.family.parameter_of(place.projection)
        count, own = len(parameter.projections), parameter.projections.index(place.projection)
        share = tensor.shape[0] // count
        rows = slice(own, None, count) if parameter.interleaved else slice(own * share, (own + 1) * share)
        return tensor.view(tensor.shape[0], -1, experts)[rows, :, place.expert]

    def read(self, place: Place, factor: Factor) -> Tensor:
        """Return a copy of A (rank, in) or B (out, rank)."""
        return self.view(place, factor).clone()

    def find_scaling(self, place: Place) -> float:
        """Return the scaling that an engine applies, as vLLM's peft_helper reads the config."""
        if self.format is TargetFormat.PER_EXPERT:
            name = self.name_of(place, Factor.A).removeprefix("base_model.model.").split(".lora_A")[0]
        else:
            name = f"experts.{self.base.family.parameter_of(place.projection).name}"
        rank, alpha = (
            next((value for key, value in found.items() if re.match(rf"(.*\.)?({key})$", name)), default)
            for found, default in (
                (self.config.get("rank_pattern", {}), self.config["r"]),
                (self.config.get("alpha_pattern", {}), self.config["lora_alpha"]),
            )
        )
        return float(alpha / rank)

    def deltas(self) -> dict[str, Tensor]:
        """Return the product of every pair of factors, float64, those of ordinary modules too; without scaling."""
        found = {
            str(place): self.read(place, Factor.B).double() @ self.read(place, Factor.A).double()
            for place in self.places()
        }
        for name in self.list_modules():
            found[name] = self.tensors[name].double() @ self.tensors[_partner(name)].double()
        return found

    def list_modules(self) -> list[str]:
        """Return the names of lora_B of the ordinary modules."""
        routed = {self.name_of(place, Factor.B) for place in self.places()}
        return [name for name in self.tensors if ".lora_B." in name and name not in routed]

    def write(self, folder: Path) -> None:
        """Write the two files, laid out as the conversion lays them out; then spoil them."""
        folder.mkdir(parents=True)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        place, parts = 0, []
        for name, tensor in self.tensors.items():
            body = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            offsets = [place, place + len(body)]
            header[name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": offsets,
            }
            parts.append(body)
            place += len(body)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _LENGTH_BYTES)
        (folder / WEIGHTS_NAME).write_bytes(
            b"".join((len(text).to_bytes(_LENGTH_BYTES, "little"), text, *parts))
        )
        (folder / CONFIG_NAME).write_text(
            json.dumps(dict(sorted(self.config.items())), indent=2) + "\n", "utf-8"
        )
        if self.spoil is not None:
            self.spoil(folder)


def read_output(folder: Path, base: BaseConfig, format: TargetFormat) -> Output:
    """Return a converted adapter."""
    loaded = load_file(folder / WEIGHTS_NAME)
    with (folder / WEIGHTS_NAME).open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(_LENGTH_BYTES), "little")))
    tensors = {name: loaded[name] for name in header if name != "__metadata__"}
    return Output(base, format, tensors, json.loads((folder / CONFIG_NAME).read_text("utf-8")))


def measure_damage(before: Output, after: Output) -> float:
    """Return the largest relative change of a single delta (Frobenius); infinite where pairs are no longer there.

    A delta that was zero and is not any more counts as changed without bound, and so does one that is not finite.
    """
    try:
        old, new = before.deltas(), after.deltas()
    except (KeyError, RuntimeError):  # a factor is missing, or has a shape that does not fit
        return float("inf")
    if old.keys() != new.keys():
        return float("inf")
    largest = 0.0
    for name, delta in old.items():
        if delta.shape != new[name].shape or not bool(new[name].isfinite().all()):
            return float("inf")
        moved, size = float((new[name] - delta).norm()), float(delta.norm())
        if moved:
            largest = max(largest, moved / size if size else float("inf"))
    return largest


def _partner(name: str) -> str:
    return name.replace(".lora_B.", ".lora_A.")
