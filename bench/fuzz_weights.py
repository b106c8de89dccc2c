"""Files of weights made wrong: header, data, single bytes."""

from __future__ import annotations

import json
import math
import struct
from random import Random
from typing import Any

from bench.fuzz_json import Change, change_tokens

_LARGEST_HEADER = 2_000_000
_METADATA = "__metadata__"
_ITEM = {"F32": 4, "F16": 2, "BF16": 2}
_DTYPES = (
    "F32",
    "F16",
    "BF16",
    "F64",
    "I8",
    "F8_E4M3",
    "BOOL",
    "f32",
    "",
    "X" * 400,
    None,
    5,
    ["F32"],
    "F32\0",
)
_SHAPES: tuple[Any, ...] = (
    *(
        [],
        [0],
        [-1],
        [1],
        [True],
        [1.0],
        ["3"],
        [None],
        [2**63],
        [10**39, 10**39],
        [10**41],
        [1] * 9,
        [3] * 2000,
    ),
    *(None, 3, "3", {}, [[3]], [12, 0], [2**32, 2**32]),
)
_OFFSETS: tuple[Any, ...] = (
    *([0, 0], [0, 1], [1, 0], [-4, 0], [0], [0, 4, 8], [0.0, 4.0], ["0", "4"], [2**63, 2**64], [0, 10**39]),
    *(None, {}, "0,4", [None, None], [True, False], [2**64 - 4, 2**64]),
)
_VALUES = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, 3.4e38, 1.0)
_NAMES = (
    ("lora_A", "lora_B"),
    ("lora_A", "lora_A.default"),
    ("lora_B.weight", "lora_B.bias"),
    ("lora_A.weight", "lora_magnitude_vector"),
    ("lora_A", "lora_embedding_A"),
    ("base_model.model.", ""),
    ("base_model.model.", "base_model.model.base_model.model."),
    ("model.layers", "model.language_model.layers"),
    ("model.", "_orig_mod.model."),
    ("layers.0", "layers.00"),
    ("layers.0", "layers.7"),
    ("layers.1", "layers.999999"),
    ("layers.1", "layers.9999999999"),
    ("layers.0", "layers.\u0660"),
    ("experts.0", "experts.4"),
    ("experts.0", "experts.1"),
    ("experts", "shared_experts"),
    ("experts", "experts.base_layer"),
    ("experts.base_layer", "experts"),
    ("proj", "PROJ"),
    ("weight", "weight\n"),
    ("weight", ""),
    ("e", "e\u0301"),
    ("a", "\u0430"),
    (".", ".."),
    ("self_attn.q_proj", "lm_head"),
    ("model", "m" * 100_000),
    ("model", "\x1b[2J\0"),
)


def change_bytes(random: Random, body: bytes) -> Change:
    """Single bytes, wherever they lie."""
    if not body:
        return random.randbytes(random.randrange(64)), "bytes: out of nothing"
    place = random.randrange(len(body)) if random.random() < 0.5 else random.randrange(min(len(body), 200))
    length = random.choice((1, 1, 2, 8, 64, 1000))
    match random.choice(("flip", "cut", "end", "insert", "splice", "zeros", "append", "set")):
        case "flip":
            flipped = body[place] ^ (1 << random.randrange(8))
            return body[:place] + bytes([flipped]) + body[place + 1 :], "bytes: a bit flipped"
        case "cut":
            return body[:place] + body[place + length :], "bytes: cut out"
        case "end":
            return body[:place], "bytes: cut off"
        case "insert":
            return body[:place] + random.randbytes(length) + body[place:], "bytes: put in"
        case "splice":
            begin = random.randrange(len(body))
            return body[:place] + body[begin : begin + length] + body[place:], "bytes: copied"
        case "zeros":
            return body[:place] + bytes(length) + body[place + length :], "bytes: zeros"
        case "append":
            return body + random.choice((b"\0", b" ", b"}", random.randbytes(length))), "bytes: put behind"
        case _:
            return body[:place] + random.randbytes(length) + body[place + length :], "bytes: set"


def change_header(random: Random, body: bytes) -> Change:
    """The header alone, so that it no longer, or only just, describes the data."""
    parsed = _parse(body)
    if parsed is None:
        return change_bytes(random, body)
    fields, data = parsed
    names = [name for name in fields if name != _METADATA]
    name = random.choice(names)
    match random.choice(
        ("dtype", "shape", "offsets", "rename", "metadata", "entry", "tokens", "length", "add")
    ):
        case "dtype":
            fields[name]["dtype"] = random.choice(_DTYPES)
        case "shape":
            own = fields[name]["shape"]
            fields[name]["shape"] = random.choice((own[::-1], [math.prod(own)], [1, *own], *_SHAPES))
        case "offsets":
            begin, end = fields[name]["data_offsets"]
            near = (
                [begin + 4, end + 4],
                [begin, end - 4],
                [begin - 1, end],
                fields[names[0]]["data_offsets"],
            )
            fields[name]["data_offsets"] = random.choice((*near, *_OFFSETS))
        case "rename":
            old, new = random.choice(_NAMES)
            many = random.random() < 0.5
            fields = {
                key.replace(old, new) if key in names and (many or key == name) else key: value
                for key, value in fields.items()
            }
            return _build(fields, data), "header: a name"
        case "metadata":
            fields[_METADATA] = random.choice((None, [], "pt", {"a": 1}, {"a": None}, {}, {"a": "x" * 10**5}))
            return _build(fields, data), "header: metadata"
        case "entry":
            fields[name] = random.choice((None, [], {}, 3, "F32", fields[name] | {"more": 1}, [fields[name]]))
        case "tokens":
            text, kind = change_tokens(random, json.dumps(fields).encode())
            return struct.pack("<Q", len(text)) + text + data, f"header {kind}"
        case "length":
            text = json.dumps(fields).encode()
            own_length = len(text)
            lengths = (
                0,
                1,
                2,
                own_length - 1,
                own_length + 1,
                own_length + len(data),
                10**8,
                2**63,
                2**64 - 1,
            )
            text = random.choice((text, text + b" " * 8, b" " + text, text + b"{}"))
            return struct.pack("<Q", random.choice(lengths)) + text + data, "header: length"
        case _:
            fields[random.choice(("", "x", name + ".more", "__metadata"))] = fields[name]
    return _build(fields, data), "header: an entry"


def change_tensors(random: Random, body: bytes) -> Change:
    """Tensors whose header and data agree, but which are others than before."""
    parsed = _parse(body)
    if parsed is None:
        return change_bytes(random, body)
    fields, data = parsed
    metadata = fields.pop(_METADATA, None)
    tensors = {
        name: (item["dtype"], item["shape"], data[item["data_offsets"][0] : item["data_offsets"][1]])
        for name, item in fields.items()
    }
    names = list(tensors)
    name = random.choice(names)
    dtype, shape, values = tensors[name]
    kind = random.choice(
        ("drop", "drop many", "values", "values", "all values", "shape", "shape", "type", "copy", "swap")
    )
    match kind:
        case "drop":
            del tensors[name]
        case "drop many":
            part = random.choice(("lora_A", "lora_B", "experts", "layers.1.", "down", "self_attn", "3."))
            tensors = {key: value for key, value in tensors.items() if part not in key}
        case "values" | "all values":
            number = random.choice(_VALUES)
            for key in names if kind == "all values" else [name]:
                own_type, own_shape, own = tensors[key]
                item = _encode_number(number, own_type)
                whole = random.random() < 0.5 or kind == "all values"
                place = random.randrange(len(own) // len(item)) * len(item)
                changed = (
                    item * (len(own) // len(item)) if whole else own[:place] + item + own[place + len(item) :]
                )
                tensors[key] = (own_type, own_shape, changed)
        case "shape":
            axis = random.randrange(len(shape)) if shape else 0
            new = list(shape)
            if new:
                new[axis] = random.choice((new[axis] + 1, new[axis] - 1, 2 * new[axis], 1, new[axis] + 3))
            shapes = (new, shape[::-1], [*shape, 1], [1, *shape], [math.prod(shape)], shape[:1] * 2)
            chosen = random.choice(shapes)
            size = math.prod(chosen) * _ITEM[dtype]
            tensors[name] = (dtype, chosen, (values * (size // len(values) + 1))[:size])
        case "type":
            other = random.choice([key for key in _ITEM if key != dtype])
            size = math.prod(shape) * _ITEM[other]
            tensors[name] = (other, shape, (values * 2)[:size])
        case "copy":
            tensors[
                random.choice((f"{name}x", name.replace("A.", "B."), f"x{name}", name.replace("0", "1")))
            ] = tensors[name]
        case _:
            other = random.choice(names)
            tensors[name], tensors[other] = tensors[other], tensors[name]
    rebuilt: dict[str, Any] = {} if metadata is None else {_METADATA: metadata}
    place = 0
    for key, (item_type, item_shape, item_data) in tensors.items():
        offsets = [place, place + len(item_data)]
        rebuilt[key] = {"dtype": item_type, "shape": item_shape, "data_offsets": offsets}
        place += len(item_data)
    return _build(rebuilt, b"".join(item[2] for item in tensors.values())), f"tensors: {kind}"


def _encode_number(number: float, dtype: str) -> bytes:
    single = struct.pack("<f", min(number, 3.4e38)) if math.isfinite(number) else struct.pack("<f", number)
    if dtype == "F32":
        return single
    if dtype == "BF16":
        return single[2:]
    return struct.pack("<e", max(-65504.0, min(number, 65504.0)) if math.isfinite(number) else number)


def _parse(body: bytes) -> tuple[dict[str, Any], bytes] | None:
    """Header and data of a file that is still sound enough to be taken apart."""
    length = int.from_bytes(body[:8], "little")
    if len(body) < 8 + length or length > _LARGEST_HEADER:
        return None
    try:
        fields = json.loads(body[8 : 8 + length])
        items = [fields[name] for name in fields if name != _METADATA]
        for item in items:
            begin, end = item["data_offsets"]
            if item["dtype"] not in _ITEM or end - begin != math.prod(item["shape"]) * _ITEM[item["dtype"]]:
                return None
            if not 0 <= begin < end <= len(body) - 8 - length:
                return None
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None
    return (fields, body[8 + length :]) if items else None


def _build(fields: dict[str, Any], data: bytes) -> bytes:
    try:
        text = json.dumps(fields).encode()
    except RecursionError:  # nested so deep that Python could just read it
        text = b"[" * 1000
    return struct.pack("<Q", len(text)) + text + data
