"""What transformers' own classes have, family by family: tests/golden/families/*.json, and adapters made from them.

Each file is a tiny config.json as transformers 5.24 saves it, and every parameter of its decoder that a LoRA can be
on. They are read as facts; `describe_model` makes them from the real class (test_families_models.py). Nothing here
looks at a family's row. Sizes that could be exchanged differ, and none is 1.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "golden" / "families"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))
RANK = 3

_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")


@dataclass(frozen=True)
class Parameter:
    """A weight. kind: "linear", "bare" (of a module that is no linear layer) or "experts"; transposed: PEFT's mark."""

    name: str
    kind: str
    shape: tuple[int, ...]
    layers: tuple[int, ...]
    transposed: bool = False


@dataclass(frozen=True)
class Inventory:
    """One file. Parameters are in the order in which the model registers them; `{layer}` stands in their names."""

    name: str
    config: dict[str, Any]
    parameters: tuple[Parameter, ...]

    @property
    def text(self) -> dict[str, Any]:
        """The part of the config that describes the decoder."""
        part: dict[str, Any] = self.config.get("text_config", self.config)
        return part

    @property
    def architecture(self) -> str:
        (architecture,) = self.config["architectures"]
        return str(architecture)

    @property
    def experts(self) -> tuple[Parameter, ...]:
        return tuple(item for item in self.parameters if item.kind == "experts")

    @property
    def others(self) -> tuple[Parameter, ...]:
        return tuple(item for item in self.parameters if item.kind != "experts")

    @property
    def absent(self) -> tuple[str, ...]:
        """Of latent attention the query, plain or in two steps, that this config does not call for."""
        if "kv_lora_rank" not in self.text:
            return ()
        return (".q_proj",) if self.text["q_lora_rank"] else (".q_a_proj", ".q_b_proj")

    @property
    def encoded(self) -> bytes:
        return json.dumps(self.config).encode()


@cache
def load_inventory(name: str) -> Inventory:
    fields = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    parameters = (
        Parameter(
            item["name"],
            item["kind"],
            tuple(item["shape"]),
            tuple(item["layers"]),
            item.get("transposed", False),
        )
        for item in fields["parameters"]
    )
    return Inventory(name, fields["config"], tuple(parameters))


def format_inventory(inventory: Inventory) -> str:
    rows = []
    for item in inventory.parameters:
        mark = {"transposed": True} if item.transposed else {}
        fields = {"name": item.name, "kind": item.kind, "shape": item.shape, "layers": item.layers, **mark}
        rows.append("  " + json.dumps(fields))
    config = json.dumps(inventory.config, indent=1).replace("\n", "\n ")
    parameters = ",\n".join(rows)
    return f'{{\n "config": {config},\n "parameters": [\n{parameters}\n ]\n}}\n'


def describe_model(name: str, config: dict[str, Any], folder: Path) -> Inventory:
    """What the class that `architectures` names registers, for this config as transformers saves it again."""
    import transformers

    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    loaded = transformers.AutoConfig.from_pretrained(folder)
    loaded.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text("utf-8"))
    with torch.device("meta"):
        model = getattr(transformers, saved["architectures"][0])(loaded)
    found: dict[tuple[Any, ...], list[int]] = {}
    for path, weight in model.named_parameters():
        layer = _LAYER.search(path)
        owner, _, leaf = path.rpartition(".")
        kind = _classify(model.get_submodule(owner), leaf, weight.ndim)
        if layer is None or kind is None or "vision" in path or "visual" in path:
            continue
        shown = _LAYER.sub("{layer}", path if kind == "experts" else owner)
        transposed = bool(getattr(model.get_submodule(owner), "is_transposed", False))
        found.setdefault((shown, kind, tuple(weight.shape), transposed), []).append(int(layer[0]))
    parameters = (
        Parameter(shown, kind, shape, tuple(layers), transposed)
        for (shown, kind, shape, transposed), layers in found.items()
    )
    return Inventory(name, saved, tuple(parameters))


def _classify(owner: torch.nn.Module, leaf: str, dimensions: int) -> str | None:
    if type(owner) is torch.nn.Linear:
        return "linear" if leaf == "weight" else None
    if dimensions == 3 and leaf.endswith("_proj"):
        return "experts"
    return "bare" if leaf == "weight" and dimensions == 2 else None


def stacked_adapter(inventory: Inventory, *, without: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Zeros under the names and in the shapes in which PEFT 0.21 saves an adapter of everything in the inventory.

    without: ends of modules that are left out. Source: PEFT 0.21.2 tuners/lora/layer.py, ParamWrapper: the parameter
    registered first ends up inside; of three dimensions the last is taken for the input, unless marked as transposed.
    """
    tensors: dict[str, torch.Tensor] = {}
    for number, item in enumerate(inventory.experts):
        experts, first, second = item.shape
        inside, out = (first, second) if item.transposed else (second, first)
        module = item.name.rpartition(".")[0] + (".base_layer" if number == 0 else "")
        for layer in item.layers:
            stem = f"base_model.model.{module.format(layer=layer)}"
            tensors[f"{stem}.lora_A.weight"] = torch.zeros(experts * RANK, inside)
            tensors[f"{stem}.lora_B.weight"] = torch.zeros(out, experts * RANK)
    for item in inventory.others:
        if item.name.endswith(without):
            continue
        out, inside = item.shape
        for layer in item.layers:
            stem = f"base_model.model.{item.name.format(layer=layer)}"
            tensors[f"{stem}.lora_A.weight"] = torch.zeros(RANK, inside)
            tensors[f"{stem}.lora_B.weight"] = torch.zeros(out, RANK)
    return tensors
