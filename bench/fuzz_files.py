"""An adapter's folder made wrong: its weights, its documents, its files, single bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from bench.fuzz_adapters import Entry, Link, Node, Upload
from bench.fuzz_json import change_config, change_json
from bench.fuzz_weights import change_bytes, change_header, change_tensors
from storage.keys import MARKER_FILE, TRAINING_FILE
from tasks.lora.files import CONFIG_NAME, INDEX_NAME, WEIGHTS_NAME

_FILE_NAMES = (
    *("adapter_model.bin", "adapter_model.pt", "optimizer.pt", "adapter_model-00001-of-00002.safetensors"),
    *(
        "ADAPTER_MODEL.SAFETENSORS",
        "adapter_config.JSON",
        "Training.json",
        "e\u0301.safetensors",
        "\u00e9.safetensors",
    ),
    *(
        "tokenizer.json",
        "checkpoint-7",
        "model.safetensors",
        "a\nb",
        "\x1b[2J",
        "x" * 255,
        "\udcff.bin",
        " ",
        "-rf",
    ),
    *(
        "\udcff.safetensors",
        "adapter_model.safetensors.tmp",
        INDEX_NAME,
        TRAINING_FILE,
        MARKER_FILE,
        "README.md",
    ),
)
_BODIES: tuple[Entry, ...] = (
    *(
        b"",
        b"\0",
        b"PK\x03\x04pickle",
        b"\x80\x04.",
        b"<!DOCTYPE html><html>",
        b"null",
        b"{}",
        b"[]",
        b" " * 100,
    ),
    b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n",
    *(Node.FOLDER, Node.PIPE),
)
_TARGETS = (
    *("/etc/passwd", "../outside", "nowhere", "/", "..", ".", "/dev/zero", "/dev/null", "/proc/self/environ"),
    *(CONFIG_NAME, WEIGHTS_NAME, TRAINING_FILE, "self", "x" * 300),
)


def change_upload(random: Random, upload: Upload, others: Sequence[Upload]) -> None:
    """Make one thing of an upload wrong, or leave it as good as it was, and note the kind.

    others: valid ones, for what comes from another adapter.
    """
    kind = random.choice(_KINDS)
    upload.kinds.append(kind(random, upload, others))


def change_output(random: Random, files: dict[str, Entry]) -> str:
    """Make one thing of a converted adapter wrong, and return the kind."""
    name = random.choice((CONFIG_NAME, WEIGHTS_NAME, WEIGHTS_NAME))
    body = files[name]
    assert isinstance(body, bytes)
    if name == CONFIG_NAME:
        files[name], kind = random.choice((change_json, change_config, change_bytes))(random, body)
    else:
        files[name], kind = random.choice((change_header, change_tensors, change_bytes))(random, body)
    return f"output {kind}"


def _weights(random: Random, upload: Upload, others: Sequence[Upload]) -> str:
    name = _pick_file(random, upload, ".safetensors")
    if name is None:
        return "nothing"
    upload.files[name], kind = random.choice((change_header, change_tensors))(random, _body(upload, name))
    return kind


def _documents(random: Random, upload: Upload, others: Sequence[Upload]) -> str:
    names = [
        name for name, body in upload.files.items() if name.endswith(".json") and isinstance(body, bytes)
    ]
    name = random.choice([*names, CONFIG_NAME, "base", "policy"])
    if name == "base":
        upload.base, kind = change_json(random, upload.base)
    elif name == "policy":
        upload.policy, kind = change_json(random, upload.policy)
    elif name not in names:
        return "nothing"
    elif name == CONFIG_NAME:
        change = random.choice((change_json, change_config, change_config))
        upload.files[name], kind = change(random, _body(upload, name))
    else:
        upload.files[name], kind = change_json(random, _body(upload, name))
    return kind


def _files(random: Random, upload: Upload, others: Sequence[Upload]) -> str:
    name = random.choice(list(upload.files)) if upload.files else WEIGHTS_NAME
    match random.choice(("remove", "replace", "add", "add link", "link", "rename", "exchange", "foreign")):
        case "remove":
            upload.files.pop(name, None)
            return "files: one removed"
        case "replace":
            upload.files[name] = random.choice(_BODIES)
            return "files: one replaced"
        case "add":
            upload.files[random.choice(_FILE_NAMES)] = random.choice(_BODIES)
            return "files: one more"
        case "add link":
            upload.files[random.choice(_FILE_NAMES)] = Link(random.choice(_TARGETS))
            return "files: a link more"
        case "link":
            # Its own name makes a loop.
            upload.files[name] = Link(random.choice((name, *_TARGETS)))
            return "files: a link instead"
        case "rename":
            if name in upload.files:
                new = random.choice((name.upper(), name.title(), f"{name} "[:255], *_FILE_NAMES))
                upload.files[new] = upload.files.pop(name)
            return "files: one renamed"
        case "exchange":
            other = random.choice(list(upload.files) or [name])
            if name in upload.files:
                upload.files[name], upload.files[other] = upload.files[other], upload.files[name]
            return "files: two exchanged"
        case _:
            upload.files |= random.choice(others).files
            return "files: of two adapters"


def _base(random: Random, upload: Upload, others: Sequence[Upload]) -> str:
    upload.base = random.choice(others).base
    return "base: another"


def _bytes(random: Random, upload: Upload, others: Sequence[Upload]) -> str:
    name = _pick_file(random, upload, "")
    if name is None:
        return "nothing"
    upload.files[name], kind = change_bytes(random, _body(upload, name))
    return kind


_KINDS: tuple[Callable[[Random, Upload, Sequence[Upload]], str], ...] = (
    *(
        _weights,
        _weights,
        _weights,
        _documents,
        _documents,
        _documents,
        _files,
        _files,
        _bytes,
        _bytes,
        _base,
    ),
)


def _pick_file(random: Random, upload: Upload, ending: str) -> str | None:
    names = [name for name, body in upload.files.items() if name.endswith(ending) and isinstance(body, bytes)]
    return random.choice(names) if names else None


def _body(upload: Upload, name: str) -> bytes:
    body = upload.files[name]
    return body if isinstance(body, bytes) else b""
