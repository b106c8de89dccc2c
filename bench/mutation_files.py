"""Damage to a converted adapter's names, config and files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

from bench.mutation_adapters import ALPHA, RANK, Host
from bench.mutation_kinds import COVERAGE, ROUND_TRIP, SIZE, Change, Damage, pick
from bench.mutation_output import Output
from tasks.lora.files import CONFIG_NAME, WEIGHTS_NAME
from tasks.lora.names import Factor
from tasks.lora.target import TargetFormat

SCALING = "scaling"
CORRUPT, AMBIGUOUS, PICKLE = "corrupt_or_partial", "ambiguous_upload", "pickle_refused"
UNSUPPORTED = "unsupported_config"

_HALF = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}


def _drop(*factors: Factor) -> Change:
    def change(output: Output, host: Host, rng: Random) -> bool:
        place = pick(output, rng)
        for factor in factors:
            del output.tensors[output.name_of(place, factor)]
        return True

    return change


def _drop_module(output: Output, host: Host, rng: Random) -> bool:
    names = output.list_modules()
    if names:
        del output.tensors[rng.choice(names)]
    return bool(names)


def _add_pair(output: Output, host: Host, rng: Random) -> bool:
    """A pair once more, for an expert or a layer that the base does not have."""
    place = pick(output, rng)
    for factor in Factor:
        name = output.name_of(place, factor)
        if output.format is TargetFormat.PER_EXPERT:
            old, new = f".experts.{place.expert}.", f".experts.{output.base.experts}."
        else:
            old, new = f"layers.{place.layer}.", f"layers.{output.base.layers}."
        output.tensors[name.replace(old, new)] = output.tensors[name].clone()
    return True


def _add(name: str) -> Change:
    def change(output: Output, host: Host, rng: Random) -> bool:
        dtype = next(iter(output.tensors.values())).dtype
        output.tensors[name] = torch.randn(RANK, 4).to(dtype)
        return True

    return change


def _rename(old: str, new: str, *, one: bool = False) -> Change:
    def change(output: Output, host: Host, rng: Random) -> bool:
        fitting = [name for name in output.tensors if old in name]
        chosen = {rng.choice(fitting)} if one and fitting else set(fitting)
        output.tensors = {
            name.replace(old, new) if name in chosen else name: tensor
            for name, tensor in output.tensors.items()
        }
        return bool(chosen)

    return change


def _exchange_names(output: Output, host: Host, rng: Random) -> bool:
    """All lora_A are called lora_B, and the other way round."""
    names = {"lora_A": "lora_B", "lora_B": "lora_A"}
    output.tensors = {
        name.replace(old := "lora_A" if "lora_A" in name else "lora_B", names[old]): tensor
        for name, tensor in output.tensors.items()
    }
    return True


def _recast(*, all_of_them: bool) -> Change:
    def change(output: Output, host: Host, rng: Random) -> bool:
        chosen = list(output.tensors) if all_of_them else [rng.choice(list(output.tensors))]
        for name in chosen:
            output.tensors[name] = output.tensors[name].to(_HALF[output.tensors[name].dtype])
        return True

    return change


def _reshape(output: Output, host: Host, rng: Random) -> bool:
    name = rng.choice(list(output.tensors))
    output.tensors[name] = output.tensors[name].reshape(-1, 1)
    return True


def _set(**fields: Any) -> Change:
    def change(output: Output, host: Host, rng: Random) -> bool:
        output.config |= fields
        return True

    return change


def _scale_alpha(by: float) -> Change:
    def change(output: Output, host: Host, rng: Random) -> bool:
        output.config["lora_alpha"] *= by
        return True

    return change


def _add_rank(output: Output, host: Host, rng: Random) -> bool:
    output.config["r"] += 1
    return True


def _forget_rslora(output: Output, host: Host, rng: Random) -> bool:
    """The trainer's alpha without the root."""
    if not host.found.layout.config.use_rslora:
        return False
    output.config["lora_alpha"] = ALPHA
    return True


def _apply_rslora_twice(output: Output, host: Host, rng: Random) -> bool:
    output.config["use_rslora"] = True
    return True


def _drop_field(field: str) -> Change:
    def change(output: Output, host: Host, rng: Random) -> bool:
        return output.config.pop(field, None) is not None

    return change


def _misdirect_alpha(output: Output, host: Host, rng: Random) -> bool:
    """The key of one module reaches another's name."""
    known = output.config.get("alpha_pattern")
    if not known:
        return False
    output.config["alpha_pattern"] = {rf"\w+_{key}": value for key, value in known.items()}
    return True


def _alpha_of_one(output: Output, host: Host, rng: Random) -> bool:
    """A pattern gives a single module another alpha."""
    place = pick(output, rng)
    if output.format is TargetFormat.PER_EXPERT:
        key = output.name_of(place, Factor.A).split("layers.")[1].split(".lora_A")[0]
    else:
        key = rf"{place.layer}\..*experts\.{output.base.family.parameter_of(place.projection).name}"
    output.config["alpha_pattern"] = {key: 3.25} | output.config.get("alpha_pattern", {})
    return True


def _lie_about_packing(output: Output, host: Host, rng: Random) -> bool:
    if output.format is not TargetFormat.STACKED:
        return False
    output.config |= {
        "lora_B_layout": "grouped_by_expert",
        "unsloth_fused_expert_lora": {"lora_B_layout": "grouped_by_expert"},
    }
    return True


def _stale_config(output: Output, host: Host, rng: Random) -> bool:
    """That of an earlier run with another rank."""
    output.config |= {"r": 2 * output.config["r"], "lora_alpha": output.config["lora_alpha"]}
    return True


def _spoil(spoil: Callable[[Path], None]) -> Change:
    def change(output: Output, host: Host, rng: Random) -> bool:
        output.spoil = spoil
        return True

    return change


def _cut(count: int | None) -> Callable[[Path], None]:
    """Take bytes away from the end, half of them for None."""

    def spoil(folder: Path) -> None:
        body = (folder / WEIGHTS_NAME).read_bytes()
        (folder / WEIGHTS_NAME).write_bytes(body[: len(body) // 2 if count is None else -count])

    return spoil


def _append(more: bytes) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        with (folder / WEIGHTS_NAME).open("ab") as file:
            file.write(more)

    return spoil


def _edit_header(edit: Callable[[dict[str, Any]], None], *, pad: int = 0) -> Callable[[Path], None]:
    """Change the header, its length and the data staying as they are."""

    def spoil(folder: Path) -> None:
        body = (folder / WEIGHTS_NAME).read_bytes()
        size = int.from_bytes(body[:8], "little")
        header = json.loads(body[8 : 8 + size])
        edit(header)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8 + pad)
        (folder / WEIGHTS_NAME).write_bytes(len(text).to_bytes(8, "little") + text + body[8 + size :])

    return spoil


def _exchange_offsets(header: dict[str, Any]) -> None:
    """Two tensors of one shape point to each other's bytes."""
    seen: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        kind = (entry["dtype"], *entry["shape"], "lora_B" in name)
        if kind in seen and seen[kind] is not entry:
            first = seen[kind]
            first["data_offsets"], entry["data_offsets"] = entry["data_offsets"], first["data_offsets"]
            return
        seen[kind] = entry


def _exchange_sides(header: dict[str, Any]) -> None:
    """A shape the other way round."""
    entry = next(
        entry for name, entry in header.items() if name != "__metadata__" and len({*entry["shape"]}) > 1
    )
    entry["shape"] = entry["shape"][::-1]


def _lie_about_dtype(header: dict[str, Any]) -> None:
    lies = {"F16": "BF16", "BF16": "F16", "F32": "I32"}
    entry = next(entry for name, entry in header.items() if name != "__metadata__")
    entry["dtype"] = lies[entry["dtype"]]


def _overlap(header: dict[str, Any]) -> None:
    first, second = [entry for name, entry in header.items() if name != "__metadata__"][:2]
    first["data_offsets"] = second["data_offsets"]


def _rename_file(folder: Path) -> None:
    (folder / WEIGHTS_NAME).rename(folder / "model.safetensors")


def _pickle(folder: Path) -> None:
    (folder / WEIGHTS_NAME).rename(folder / "adapter_model.bin")


def _second_file(folder: Path) -> None:
    body = (folder / WEIGHTS_NAME).read_bytes()
    (folder / "adapter_model-00001-of-00001.safetensors").write_bytes(body)


def _remove_config(folder: Path) -> None:
    (folder / CONFIG_NAME).unlink()


def _half_config(folder: Path) -> None:
    body = (folder / CONFIG_NAME).read_bytes()
    (folder / CONFIG_NAME).write_bytes(body[: len(body) // 2])


_NAMES = (COVERAGE, SIZE, ROUND_TRIP)
FILES = (
    Damage("one pair missing", _NAMES, _drop(*Factor)),
    Damage("one factor missing", _NAMES, _drop(Factor.B)),
    Damage("one attention factor missing", _NAMES, _drop_module),
    Damage("one pair doubled, for an expert or layer too many", _NAMES, _add_pair),
    Damage("a tensor more, of the head", _NAMES, _add("base_model.model.lm_head.lora_A.weight")),
    Damage("a tensor more, of no module", _NAMES, _add("base_model.model.model.surprise.lora_A.weight")),
    Damage("wrong prefix, everywhere", _NAMES, _rename("base_model.model.", "base_model.model.model.")),
    Damage("no prefix", _NAMES, _rename("base_model.model.", "")),
    Damage("wrong prefix of one tensor", _NAMES, _rename("base_model.model.", "base_model.", one=True)),
    Damage("a letter of one name", _NAMES, _rename("experts", "expertz", one=True)),
    Damage("layers counted from one", _NAMES, _rename("layers.0.", "layers.9.")),
    Damage("A and B named the other way round", _NAMES, _exchange_names),
    Damage("one tensor in another dtype", _NAMES, _recast(all_of_them=False)),
    Damage("all tensors in another dtype", _NAMES, _recast(all_of_them=True)),
    Damage("one tensor in another shape", _NAMES, _reshape),
    Damage("alpha doubled", (SCALING,), _scale_alpha(2)),
    Damage("alpha off by one in a thousand", (SCALING,), _scale_alpha(1.001)),
    Damage("rank one too high", (SCALING,), _add_rank),
    Damage("rsLoRA dropped", (SCALING,), _forget_rslora),
    Damage("rsLoRA applied twice", (SCALING,), _apply_rslora_twice),
    Damage("alpha_pattern dropped", (SCALING,), _drop_field("alpha_pattern")),
    Damage("rank_pattern dropped", (SCALING,), _drop_field("rank_pattern")),
    Damage("alpha_pattern reaches no name", (SCALING,), _misdirect_alpha),
    Damage("one module with another alpha", (SCALING,), _alpha_of_one),
    Damage("stale config: an earlier run's", (SCALING,), _stale_config),
    Damage("config asks for DoRA", (UNSUPPORTED,), _set(use_dora=True)),
    Damage("config asks for biases", (UNSUPPORTED,), _set(bias="all")),
    Damage("config saves whole modules", (UNSUPPORTED,), _set(modules_to_save=["lm_head"])),
    Damage("stacked target says it is grouped", ("config",), _lie_about_packing),
    Damage("file cut by a byte", (CORRUPT,), _spoil(_cut(1))),
    Damage("half a file", (CORRUPT,), _spoil(_cut(None))),
    Damage("bytes behind the data", (CORRUPT,), _spoil(_append(b"\0" * 16))),
    Damage("header exchanges two tensors", (ROUND_TRIP,), _spoil(_edit_header(_exchange_offsets))),
    Damage("header turns a shape", (COVERAGE,), _spoil(_edit_header(_exchange_sides))),
    Damage(
        "header names another dtype",
        (COVERAGE, "unsupported_dtype"),
        _spoil(_edit_header(_lie_about_dtype)),
    ),
    Damage("header lets two tensors overlap", (CORRUPT,), _spoil(_edit_header(_overlap))),
    Damage("weights under another name", (CORRUPT,), _spoil(_rename_file)),
    Damage("weights pickled", (PICKLE,), _spoil(_pickle)),
    Damage("two weight files", (AMBIGUOUS,), _spoil(_second_file)),
    Damage("no config", (CORRUPT,), _spoil(_remove_config)),
    Damage("half a config", (UNSUPPORTED,), _spoil(_half_config)),
)
