"""Uploads as any program may leave them in the store, good and bad: all that can be wrong with one.

Most bad ones are the rows of test_refusals.py's table, put into the store; here is what only a store can bring about.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from lora_builders import Logical, Separate, attention, encode, encode_experts, save_adapter
from pipeline_builders import BASE, CONTROL_BPB, OTHER_BPB, OWN_BPB, add_tiny_base
from structured_builders import RANK as GROVE_RANK
from structured_builders import SIZES, blank, trained
from test_refusals import CONFIG, DOWN_A, GOOD, QUERY, TABLE, WEIGHTS, Refused

from storage.heldout import register_heldout
from storage.s3 import S3Store

Files = dict[str, bytes]
RUN = "run-1"

# A base for the rows of the table that are about another one: how its config.json differs from the tiny one's.
BASES: Mapping[str, dict[str, Any]] = {
    BASE: {},
    "dense": {"model_type": "llama"},
    "wide": {"hidden_size": 12},
    "sharing": {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 9},
    "square": {"hidden_size": 7},
    "grove": SIZES,
}
_BASE_OF_ROW = {
    "base without experts": "dense",
    "another base": "wide",
    "shared experts alone": "sharing",
    "square alone": "square",
}
# No store has links, keys that are no text, or our made-up family; of names in other letters it says so itself, below.
ELSEWHERE = {
    "config that leads out",
    "name that is no text",
    "pair of either parameter",
    "save in other letters",
    "statement in other letters",
}

# What is found out by scoring. For that an adapter is staged, and stays so.
SCORED = {
    "refused_by_engine",
    "no_effect",
    "control_not_worse",
    "not_better_than_base",
    "not_better_than_wrong",
    "too_little_text",
}


@dataclass(frozen=True)
class Sent:
    """What lies in the store for one upload: its files, and what its marker lists beside them or says otherwise."""

    files: Files
    base: str = BASE
    listed: Files = field(default_factory=dict)
    promised: Files = field(default_factory=dict)


@dataclass(frozen=True)
class Upload:
    """One upload and how it must end.

    facts: parts of the reason. units: of held-out text. scores: of own and control on it, None for exactly the base's.
    others: those of other authors' adapters. refused: what the engine says that does not load it.
    """

    outcome: str
    code: str | None
    make: Callable[[Path], Sent]
    facts: tuple[str, ...] = ()
    units: int = 24
    scores: tuple[float, float] | None = (OWN_BPB, CONTROL_BPB)
    others: float = OTHER_BPB
    refused: str = ""


@dataclass(frozen=True)
class Unknown:
    """An upload that no ledger can tell of: how its run ends, its marker (None: without), and if the sweep sees it."""

    state: str
    marker: Callable[[dict[str, Any]], object]
    swept: bool = True


def author_of(name: str) -> str:
    """A name of the table as an author's."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def quarantined(code: str, make: Callable[[Path], Sent], *facts: str, **more: Any) -> Upload:
    return Upload("quarantined", code, make, facts, **more)


def saved(folder: Path, tensors: dict[str, torch.Tensor], base: str = BASE, **config: Any) -> Sent:
    """What `save_adapter` leaves, as an upload for this base."""
    return Sent(read_files(save_adapter(folder, tensors, **config)), base)


def read_files(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def adapter(
    *, files: Mapping[str, bytes | Callable[[bytes], bytes]] | None = None, **more: Any
) -> Callable[[Path], Sent]:
    """A good adapter, whose numbers the folder's name decides, but for these files and what its marker says."""
    shown = {name: more.pop(name) for name in ("base", "listed", "promised") if name in more}

    def make(folder: Path) -> Sent:
        tensors = encode(Logical(seed=crc32(folder.name.encode()))) | attention()
        made = saved(folder, tensors, **({"lora_B_layout": "rank_major"} | more)).files
        for name, data in (files or {}).items():
            made[name] = data if isinstance(data, bytes) else data(made[name])
        return Sent(made, **shown)

    return make


def tensors(**changed: torch.Tensor) -> Callable[[Path], Sent]:
    """A good adapter with other tensors under these names of the table's."""
    return lambda folder: saved(folder, GOOD | attention() | changed)


def from_row(name: str, row: Refused) -> Upload:
    """A row of the table, as an upload."""

    def make(folder: Path) -> Sent:
        save_adapter(folder, GOOD if row.tensors is None else row.tensors, **(row.config or {}))
        row.files(folder)
        return Sent(read_files(folder), _BASE_OF_ROW.get(name, BASE))

    return quarantined(row.code, make, row.where, row.expected, row.found, row.advice)


def without_a_shard(folder: Path) -> Sent:
    files = saved(folder, GOOD | attention(), shards=2).files
    del files["adapter_model-00002-of-00002.safetensors"]
    return Sent(files)


def without_an_expert(folder: Path) -> Sent:
    left = {name: one for name, one in encode_experts(Separate()).items() if ".1.mlp.experts.2." not in name}
    return saved(folder, left)


def misread(folder: Path, **said: Any) -> Sent:
    """Tensors that a training step left grouped_by_expert, whatever is said of them."""
    logical = trained(11, "gate_up_proj", "down_proj")
    return saved(folder, encode(logical, packing="grouped_by_expert"), "grove", r=GROVE_RANK, **said)


def misstated(folder: Path) -> Sent:
    sent = misread(folder)
    return Sent(sent.files | {"training.json": b'{"lora_B_layout": "rank_major"}'}, "grove")


def untold(folder: Path) -> Sent:
    return saved(folder, encode(blank(5)), "grove", r=GROVE_RANK)


def poison(tensor: torch.Tensor, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed[1, 2] = value
    return changed


_PAGE = b"<!DOCTYPE html><html><body>404 Not Found</body></html>"
_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 1290000000\n"
_STATED = "training.json"

FROM_ROWS = {name: from_row(name, row) for name, row in TABLE.items() if name not in ELSEWHERE}
BY_A_STORE = {
    # file
    "web page": quarantined("corrupt_or_partial", adapter(files={WEIGHTS: _PAGE}), WEIGHTS),
    "pointer": quarantined("corrupt_or_partial", adapter(files={WEIGHTS: _POINTER}), "git lfs pull"),
    "no bytes": quarantined("corrupt_or_partial", adapter(files={WEIGHTS: b""}), WEIGHTS),
    "absurd header": quarantined(
        "corrupt_or_partial", adapter(files={WEIGHTS: b"\xff" * 7 + b"\x7f" + b"{}"}), WEIGHTS
    ),
    "padded": quarantined(
        "corrupt_or_partial", adapter(files={WEIGHTS: lambda whole: whole + b"x"}), WEIGHTS
    ),
    "shard missing": quarantined("corrupt_or_partial", without_a_shard, "00002-of-00002"),
    "other bytes than promised": quarantined(
        "corrupt_or_partial", adapter(promised={CONFIG: b"other bytes"}), CONFIG, "Submit it again"
    ),
    "statement that is a page": quarantined("corrupt_or_partial", adapter(files={_STATED: _PAGE}), _STATED),
    "statement of a wrong type": quarantined(
        "corrupt_or_partial", adapter(files={_STATED: b'{"authors": ["Ada B."]}'}), "authors.0"
    ),
    "checkpoints in folders": quarantined(
        "ambiguous_upload", adapter(listed={f"checkpoint-500/{WEIGHTS}": b"x"}), "lies in a folder"
    ),
    "path that leads out": quarantined(
        "ambiguous_upload", adapter(listed={f"../run-2/{WEIGHTS}": b"x"}), "lies in a folder"
    ),
    "names in two cases": quarantined(
        "ambiguous_upload", adapter(listed={WEIGHTS.upper(): b"x"}), "nothing but case or Unicode form"
    ),
    "names in two unicode forms": quarantined(
        "ambiguous_upload", adapter(listed={"caf\u00e9.md": b"x", "cafe\u0301.md": b"y"}), "Unicode form"
    ),
    "statement under other letters": quarantined(
        "ambiguous_upload", adapter(files={"Training.json": b"{}"}), "in other letters", "rename it"
    ),
    "name of the marker": quarantined(
        "ambiguous_upload", adapter(listed={"_READY.json": b"x"}), "_READY.json"
    ),
    # config, names, values
    "config that is no json": quarantined("unsupported_config", adapter(files={CONFIG: b"{"}), CONFIG),
    "config that is a list": quarantined("unsupported_config", adapter(files={CONFIG: b"[]"}), CONFIG),
    "bias": quarantined("unsupported_config", adapter(bias="all"), "bias"),
    "replicated layers": quarantined(
        "unsupported_config", adapter(layer_replication=[[0, 1]]), "layer_replication"
    ),
    "init that moves the base": quarantined(
        "unsupported_config", adapter(init_lora_weights="pissa"), "pissa"
    ),
    "expert missing": quarantined("missing_tensor", without_an_expert, "experts.2"),
    "infinite": quarantined("non_finite", tensors(**{DOWN_A: poison(GOOD[DOWN_A], torch.inf)}), DOWN_A),
    "rank of another save": quarantined("shape_mismatch", adapter(rank_pattern={"q_proj": 4}), QUERY),
    # layout: by the tensors, and by scores that tell nothing
    "false marker": quarantined(
        "layout_conflict", lambda folder: misread(folder, lora_B_layout="rank_major"), "grouped_by_expert"
    ),
    "false statement": quarantined("layout_conflict", misstated, "grouped_by_expert"),
    "either reading": quarantined("layout_undecided", untold, scores=(OWN_BPB, OWN_BPB)),
    # engine and scores
    "refused by the engine": quarantined(
        "refused_by_engine", adapter(), "no such luck", refused="no such luck"
    ),
    "no effect": quarantined("no_effect", adapter(), scores=None),
    # Megatron-Bridge#5634, #5484: trained by wrong numbers, which no byte of the adapter shows.
    "no better than the base": quarantined("not_better_than_base", adapter(), scores=(2.45, 2.6)),
    "read in the wrong way": quarantined("control_not_worse", adapter(), scores=(2.401, OWN_BPB)),
    "three texts": Upload("inconclusive", "too_little_text", adapter(), units=3),
    # not there yet
    "no text": Upload("waiting", "no_heldout", adapter(), ("roster heldout add",), units=0),
    "text that is named and missing": Upload(
        "waiting", "no_heldout", adapter(files={_STATED: b'{"heldout": ["ada/absent"]}'}), ("ada/absent",)
    ),
    "unknown base": Upload("waiting", "unknown_base", adapter(base="nowhere"), ("roster base add nowhere",)),
}
BAD: Mapping[str, Upload] = {author_of(name): one for name, one in (FROM_ROWS | BY_A_STORE).items()}


def perfect(number: int) -> Callable[[Path], Sent]:
    """One of the good adapters: trainers differ, and leave other files beside."""

    def make(folder: Path) -> Sent:
        logical = Logical(seed=100 + number, dtype=torch.bfloat16 if number % 5 == 4 else torch.float32)
        plain = attention(dtype=logical.dtype)
        match number % 4:
            case 0:
                sent = saved(folder, encode(logical) | plain, lora_B_layout="rank_major")
            case 1:
                packed = encode(logical, packing="grouped_by_expert")
                sent = saved(folder, packed | plain, lora_B_layout="grouped_by_expert", shards=2)
            case 2:
                swapped = encode(logical, orientation="swapped")
                sent = saved(folder, swapped | plain, lora_B_layout="rank_major")
            case _:
                own = {name: one * (1 + number / 64) for name, one in encode_experts(Separate()).items()}
                sent = saved(folder, own | attention(), target_parameters=None)
        beside = {"tokenizer.json": b"{}", "training_args.bin": b"never opened", "README.md": b"An adapter."}
        stated = json.dumps({"peft_version": "0.21.2", "mood": number}).encode()
        return Sent(sent.files | beside | ({_STATED: stated} if number % 2 else {}))

    return make


PERFECT: Mapping[str, Upload] = {
    f"good-{number:02}": Upload("ready", None, perfect(number)) for number in range(20)
}
# To be sent when others are served already.
LATE: Mapping[str, Upload] = {
    "nearer-to-another": quarantined("not_better_than_wrong", adapter(), scores=(2.2, 2.39), others=2.0)
}
UPLOADS: Mapping[str, Upload] = {**PERFECT, **BAD, **LATE}
# Author → whose files are in order, and whose marker is not: how the run ends that takes it up. It has no ledger.
UNKNOWN: Mapping[str, Unknown] = {
    "still-without-marker": Unknown("Waiting: incomplete_upload", lambda marker: None, swept=False),
    "file-to-come": Unknown(
        "Waiting: incomplete_upload", lambda marker: list_also(marker, "late.md"), swept=False
    ),
    "file-half-there": Unknown(
        "Waiting: incomplete_upload", lambda marker: list_also(marker, CONFIG), swept=False
    ),
    "marker-without-fields": Unknown("Refused: corrupt_or_partial", lambda marker: {"schema": 1}),
    "marker-of-another": Unknown(
        "Refused: corrupt_or_partial", lambda marker: marker | {"author": "good-00"}
    ),
    "marker-of-nothing": Unknown(
        "Refused: corrupt_or_partial", lambda marker: list_only(marker, "README.md")
    ),
}


def prepare(store: S3Store, url: str) -> None:
    """Register every base, served by the scripted engine at `url`."""
    for name, changes in BASES.items():
        add_tiny_base(store, name, url=url, **changes)


def put_upload(store: S3Store, folder: Path, author: str, upload: Upload) -> Sent:
    """An author's text and upload, put into the store as any program may do it."""
    if upload.units:
        lines = (
            json.dumps({"id": f"u{n}", "text": f"{author} wrote text {n}. " + chr(97 + n % 26) * 330})
            for n in range(upload.units)
        )
        (folder / "main.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
        register_heldout(store, author, "main", folder / "main.jsonl")
    sent = upload.make(folder / author)
    send(store, author, sent)
    return sent


def put_unknown(store: S3Store, folder: Path, author: str, unknown: Unknown) -> None:
    send(store, author, adapter()(folder / author), marker=unknown.marker)


def send(
    store: S3Store,
    author: str,
    sent: Sent,
    *,
    run: str = RUN,
    marker: Callable[[dict[str, Any]], object] = lambda marker: marker,
) -> None:
    """The files one by one, and the marker last."""
    for name, data in sent.files.items():
        store.put(f"uploads/{author}/{run}/{name}", data)
    last = marker(marker_of(author, run, sent))
    if last is not None:
        store.put(f"uploads/{author}/{run}/_READY.json", json.dumps(last).encode())


def list_also(marker: dict[str, Any], name: str) -> dict[str, Any]:
    """A marker that lists a file of this name and another size than any that is there."""
    left = [file for file in marker["files"] if file["name"] != name]
    return marker | {"files": [*left, {"name": name, "bytes": 10**6, "sha256": "ab" * 32}]}


def list_only(marker: dict[str, Any], name: str) -> dict[str, Any]:
    return marker | {"files": [{"name": name, "bytes": 3, "sha256": "ab" * 32}]}


def marker_of(author: str, run: str, sent: Sent) -> dict[str, Any]:
    """The marker that lists these files, spelled out."""
    listed = [
        {
            "name": name,
            "bytes": len(data),
            "sha256": hashlib.sha256(sent.promised.get(name, data)).hexdigest(),
        }
        for name, data in [*sent.files.items(), *sent.listed.items()]
    ]
    now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    return {
        "schema": 1,
        "submitted_at": now,
        "submission": f"{now}-{crc32(f'{author}/{run}'.encode()):08x}",
        "author": author,
        "run": run,
        "base": sent.base,
        "files": listed,
    }


def score(name: str, author: str) -> float | None:
    """Mean bits per byte of an adapter on an author's text, as that author's upload means it to be."""
    scores = UPLOADS[author].scores
    if scores is None:
        return None
    own, control = scores
    if not name.startswith((f"{author}@", f"{author}~control@")):
        return UPLOADS[author].others
    return control if "~control@" in name else own


REFUSED = {f"{author}@": upload.refused for author, upload in UPLOADS.items() if upload.refused}
