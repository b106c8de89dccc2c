"""JSON documents made wrong: fields, values, tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

# A mutation returns what it makes of a document's bytes, and what kind it is.
Change = tuple[bytes, str]

_CATASTROPHIC = (
    "(a+)+$",
    "(.*)*x",
    ".*.*.*.*x$",
    r"(\w|\w\w)*\.",
    "(?:(?:(?:.*)*)*)*",
    "x{99999999999}",
    "x{1,60000}",
    "(" * 3000 + "a" + ")" * 3000,
    "(?P<a>x)(?P=a)",
    "(?<=a+)b",
    "[",
    "(?i)down_proj",
    "(?s:.*)",
    "down_proj|" * 2000,
    "|".join(f".*{letter}" for letter in "abcdefgh"),
    "a?" * 40 + "a" * 40,
    r"\1",
    "^(?=.*e)(?=.*x)(?=.*p).*$",
    "",
    "\\",
    "[\ud83d\ude00-\U0010ffff]+",
)
_EDGES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 512, 513, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**39, 10**4200),
    *(0.0, -0.0, 0.5, 1e-320, 1.0, 3.0, 1e16, 1e308, -1.5),
    *(
        "",
        " ",
        "0",
        "3",
        "null",
        "LORA",
        "a" * 10_000,
        "\0",
        "\x1b[31m\n",
        "../../etc/passwd",
        "é",
        "e\u0301",
    ),
    *("٣", "\U0001f600", "1.2.3", "9" * 30, "0.21.2.dev0+é", "all-linear", "rank_major", "grouped_by_expert"),
    *("2026-03-01T10:00:00Z", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "1e999"),
    *([], [[]], [None], [0], [1, 2, 3], ["a"], ["a", 1], [{}], [[[[[]]]]], ["full_attention"] * 3),
    *({}, {"": 0}, {"a": None}, {"a": {"a": {"a": []}}}, {"down_proj": 1.5}, {"gate_up_proj": "rank_major"}),
    *({pattern: 3} for pattern in _CATASTROPHIC),
)
_NUMBERS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e999",
    "9" * 5000,
    "-0",
    "0x10",
    "01",
    "1.",
    "+1",
    "1E5",
)
_FIELDS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("use_dora", (True, "true", 1, None)),
    ("lora_bias", (True, "yes")),
    ("bias", ("all", "lora_only", None, "None")),
    ("modules_to_save", (["lm_head"], ["embed_tokens", "lm_head"], "lm_head")),
    ("init_lora_weights", ("pissa", "olora", "loftq", "corda", "pissa_niter_16", "eva", "gaussian", 0)),
    ("layer_replication", ([[0, 2]], [[1]])),
    ("alora_invocation_tokens", ([1, 2], [])),
    ("trainable_token_indices", ([1], {"embed_tokens": [1]})),
    ("use_rslora", (True, "true", 1)),
    ("rank_pattern", tuple({pattern: 3, "q_proj": 3} for pattern in _CATASTROPHIC)),
    ("alpha_pattern", tuple({pattern: 5.5} for pattern in _CATASTROPHIC)),
    ("alpha_pattern", ({"down_proj": 3, "experts.down_proj": 5}, {".*": 0}, {".*": 1e-300}, {".*": 2**52})),
    ("target_modules", ("all-linear", ".*proj", ["q_proj"], [], None, ["(" * 50])),
    ("target_parameters", (["x"], [], ["mlp.experts.down_proj"], [""], ["gate.weight"])),
    ("peft_type", ("LOHA", "lora", "ADALORA", 3)),
    ("peft_version", ("0.17.0", "0.18.0", "0.19.0rc1", "nightly", "", "9" * 5000)),
    ("r", (0, 1, 2, 6, 12, 512, 513, "3", 3.0, 2**31 - 1)),
    ("lora_alpha", (0, -1, 1e-300, 2**52, 3.5, "6", 5e-324)),
    (
        "auto_mapping",
        ({"unsloth_fixed": True}, {"lora_B_layout": "rank_major"}, {"unsloth_fused_expert_lora": {}}),
    ),
    (
        "unsloth_fused_expert_lora",
        ({"parameters": {"down_proj": {"lora_B_layout": "rank_major"}}}, {"parameters": 3}),
    ),
    ("lora_B_layout", ("rank_major", "grouped_by_expert", "other", "RANK_MAJOR", 7)),
    ("a_field_of_tomorrow", (True, {"deep": [1]}, "x" * 300)),
)


def change_json(random: Random, body: bytes) -> Change:
    """Return the document with one thing wrong in it; bytes that are no JSON come back with nonsense behind."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return body + random.choice((b"}", b"\0", b"null")), "json: nonsense behind"
    return random.choice(_CHANGES)(random, document)


def change_config(random: Random, body: bytes) -> Change:
    """Return an adapter_config.json with one field that means something set to a value that may or may not do."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return change_json(random, body)
    if not isinstance(document, dict):
        return change_json(random, body)
    name, values = random.choice(_FIELDS)
    return _dump(document | {name: random.choice(values)}), "config: a known field"


def change_tokens(random: Random, text: bytes) -> Change:
    """Return the text with a JSON token replaced by one that JSON does not have, or hardly any parser takes."""
    kind = random.choice(("number", "nesting", "escape", "repeat", "cut", "encoding"))
    if kind == "number":
        places = [place for place, byte in enumerate(text) if byte in b"0123456789"] or [0]
        place = random.choice(places)
        return text[:place] + random.choice(_NUMBERS).encode() + text[place + 1 :], "tokens: a number"
    if kind == "nesting":
        depth = random.choice((50, 500, 990, 5_000, 200_000))
        opening, closing = random.choice((("[", "]"), ('{"a":', "}")))
        deep = f'"deep":{opening * depth}0{closing * depth},'.encode()
        return text.replace(b"{", b"{" + deep, 1), "tokens: nesting"
    if kind == "escape":
        places = [place for place, byte in enumerate(text) if byte == ord('"')] or [0]
        escape = random.choice(
            (rb"\ud800", rb"\udc00\ud800", rb"\u0000", rb"\x41", rb"\ud83d\ude00", rb"\u0065")
        )
        place = random.choice(places)
        return text[: place + 1] + escape + text[place + 1 :], "tokens: an escape"
    if kind == "repeat":
        return text.replace(b"{", b'{"r":1,"r":2,', 1), "tokens: a repeated key"
    if kind == "cut":
        return text[: random.randrange(len(text) + 1)], "tokens: cut"
    spelt = text.decode("utf-8", "replace")
    codec = random.choice(("utf-16", "utf-32", "utf-8-sig", "utf-7"))
    return spelt.encode(codec), "tokens: another encoding"


def _set_value(random: Random, document: Any) -> Change:
    parent, key = _pick(random, document)
    if parent is None:
        return _dump(random.choice(_EDGES)), "json: another value for the whole"
    parent[key] = random.choice(_EDGES)
    return _dump(document), "json: another value"


def _delete(random: Random, document: Any) -> Change:
    parent, key = _pick(random, document)
    if parent is not None:
        del parent[key]
    return _dump(document), "json: something missing"


def _rename(random: Random, document: Any) -> Change:
    parent, key = _pick(random, document)
    if isinstance(parent, dict):
        names = (key.upper(), f"{key} ", f"{key}\u200b", "", key[1:], "é", "e\u0301", key * 50, "\x1b[2J")
        parent[random.choice(names)] = parent.pop(key)
    return _dump(document), "json: another name"


def _add(random: Random, document: Any) -> Change:
    parent, _ = _pick(random, document)
    if isinstance(parent, dict):
        parent[random.choice(("unknown", "schema", "", "a.b", "__proto__", "\n"))] = random.choice(_EDGES)
    elif isinstance(parent, list):
        parent.insert(random.randrange(len(parent) + 1), random.choice(_EDGES))
    return _dump(document), "json: something more"


def _swap(random: Random, document: Any) -> Change:
    first, one = _pick(random, document)
    second, other = _pick(random, document)
    if first is not None and second is not None:
        held = json.dumps(first[one])
        first[one] = json.loads(json.dumps(second[other]))
        if other in second if isinstance(second, dict) else other < len(second):
            second[other] = json.loads(held)
    return _dump(document), "json: two values exchanged"


def _change_text(random: Random, document: Any) -> Change:
    return change_tokens(random, _dump(document))


_CHANGES: tuple[Callable[[Random, Any], Change], ...] = (
    *(_set_value, _set_value, _set_value, _delete, _rename, _add, _swap, _change_text, _change_text),
)


def _pick(random: Random, document: Any) -> tuple[Any, Any]:
    """A place somewhere in the document: what holds it, and its key there; (None, None) for the whole."""
    places: list[tuple[Any, Any]] = [(None, None)]
    waiting = [document]
    while waiting and len(places) < 300:
        value = waiting.pop()
        keys = (
            list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        )
        places += [(value, key) for key in keys]
        waiting += [value[key] for key in keys]
    return random.choice(places[1:] or places) if random.random() < 0.97 else places[0]


def _dump(document: Any) -> bytes:
    try:
        return json.dumps(document).encode()
    except RecursionError:  # nested so deep that Python could just read it
        return b"[" * 1000
