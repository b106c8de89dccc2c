"""A trainer's adapter in a model, by PEFT: read whole, in the packing that it was trained in, or not at all."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from tasks.bpb.reference_errors import AdapterNotRead, PackingUnstated
from tasks.bpb.reference_files import (
    CONFIG_NAME,
    ExpertPacking,
    StatedPacking,
    read_peft_version,
    read_stated_packing,
)

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

_ADAPTER = "reference"
_WEIGHTS_NAME = "adapter_model.safetensors"
_SHOWN = 300
# What PEFT and safetensors raise for a config or a file that is not what they expect.
_OF_PEFT = (OSError, ValueError, KeyError, TypeError, RuntimeError, NotImplementedError, SafetensorError)
_NOT_READ = "Score it with the PEFT that trained it, or save it again for this one: `roster migrate`."


def put_adapter(base: PreTrainedModel, directory: Path, packing: ExpertPacking | None) -> PeftModel:
    """Put an adapter into a model, which `unload` of the result takes out again; the model's own weights stay.

    packing: how its stacked lora_B lies, whatever it states; None for what it states. PEFT reads rank_major, so that
    the other one is rewritten in memory. After an error the model may be half an adapted one: read it again.

    Raises:
        PackingUnstated: its experts are stacked, and neither it nor `packing` says how.
        AdapterNotRead: PEFT does not read it, not all of it, or could mistake rows for columns.
    """
    _check_files(directory)
    stated = StatedPacking(otherwise=packing) if packing else read_stated_packing(directory)
    from peft import PeftConfig, PeftModel

    try:
        with warnings.catch_warnings():
            # Of the packing's marker and of patterns' keys that it does not know. What it leaves out is checked below.
            warnings.simplefilter("ignore")
            config = PeftConfig.from_pretrained(str(directory), local_files_only=True)
            config.inference_mode = True
            wrapped = PeftModel(base, config, _ADAPTER)
            result = wrapped.load_adapter(str(directory), _ADAPTER, torch_device=str(base.device))
    except torch.OutOfMemoryError:
        raise
    except _OF_PEFT as error:
        raise _not_read(directory, "an adapter that PEFT reads", one_line(error)) from error
    wrapped.eval()
    _check_keys(directory, result)
    _check_orientation(directory, wrapped, read_peft_version(directory))
    _apply_packing(directory, wrapped, stated)
    return wrapped


def _check_files(directory: Path) -> None:
    """Return if there is an adapter: for what is not here PEFT would ask a model hub.

    Raises:
        AdapterNotRead: its config or its weights are not there.
    """
    for name in (CONFIG_NAME, _WEIGHTS_NAME):
        if not (directory / name).is_file():
            raise AdapterNotRead(
                str(directory), name, "no such file", "Give the directory that the trainer saved."
            )


def _check_keys(directory: Path, result: Any) -> None:
    """Return if PEFT took every tensor of the file, and found one for each factor that it made.

    Raises:
        AdapterNotRead: PEFT itself only warns, or says nothing.
    """
    for keys, found in ((result.unexpected_keys, "left out"), (result.missing_keys, "not in the file")):
        if keys:
            expected = "every tensor of the file in its place"
            raise _not_read(directory, expected, f"{len(keys)} {found}, such as {keys[0]}")


def _check_orientation(directory: Path, wrapped: PeftModel, trained_with: str | None) -> None:
    """Return if shapes, or the same reading by the PEFT that trained, show that A and B are not exchanged.

    Source: PEFT 0.17 to 0.21.2 tuners/lora/layer.py ParamWrapper: up to 0.18.1, in 0.19.0 and from 0.19.1 on, stacked
    parameters' in and out are told in three ways.

    Raises:
        AdapterNotRead: every stacked parameter has in = out, and the PEFT here reads such files in another way.
    """
    stacked = list(_list_stacked(wrapped))
    if not stacked or any(module.in_features != module.out_features for module in stacked):
        return
    here = metadata.version("peft")
    if _era(trained_with) is None or _era(trained_with) != _era(here):
        expected = f"a peft_version that reads stacked factors of equal sides as PEFT {here} does"
        raise _not_read(directory, expected, f"peft_version {trained_with}")


def _era(version: str | None) -> int | None:
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version or "")
    if numbers is None:
        return None
    release = tuple(map(int, numbers.groups()))
    return sum(release >= first for first in ((0, 19, 0), (0, 19, 1)))


def _apply_packing(directory: Path, wrapped: PeftModel, stated: StatedPacking) -> None:
    """Bring the stacked lora_B of a model into rank_major, as PEFT reads it, in memory.

    Raises:
        PackingUnstated: nothing says what the packing of one of them is.
    """
    for module in _list_stacked(wrapped):
        weight = module.lora_B[_ADAPTER].weight
        rank = weight.shape[1] // module.num_experts
        if rank == 1:
            continue
        packing = stated.of(module.parameter_name)
        if packing is None:
            advice = (
                "Say --packing rank_major (PEFT alone, unsloth_zoo from 2026.9.6) or --packing grouped_by_expert "
                "(unsloth_zoo up to 2026.9.5, Megatron-Bridge): a wrong one scores about like the base."
            )
            where = f"{directory}: lora_B of {module.parameter_name}"
            raise PackingUnstated(where, "a lora_B_layout in its files, or --packing", "neither", advice)
        if packing is ExpertPacking.GROUPED_BY_EXPERT:
            grouped = weight.data.unflatten(1, (module.num_experts, rank))
            weight.data = grouped.transpose(1, 2).flatten(1).contiguous()


def _list_stacked(wrapped: PeftModel) -> Iterator[Any]:
    """PEFT's wrappers of parameters that hold several experts."""
    from peft.tuners.lora.layer import ParamWrapper

    for module in wrapped.modules():
        if isinstance(module, ParamWrapper) and module.num_experts > 1 and _ADAPTER in module.lora_B:
            yield module


def _not_read(directory: Path, expected: str, found: str) -> AdapterNotRead:
    return AdapterNotRead(str(directory), expected, found, _NOT_READ)


def one_line(error: Exception) -> str:
    """What an error says, on one line, cut where it is long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
