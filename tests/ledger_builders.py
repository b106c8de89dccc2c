"""Ledger documents for tests, as plain JSON objects, built without any of the product's code."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from roster.incoming import BaseText, LedgerText

Document = dict[str, Any]

STEP_VERSIONS = {
    kind: "1" for kind in ("inspected", "converted", "checked", "staged", "opponents", "scored", "verdict")
}


def digest(name: str) -> str:
    """Return a sha256 in hex, unique for `name`."""
    return hashlib.sha256(name.encode()).hexdigest()


def submission(number: int) -> str:
    """Return the name of the `number`-th submission; names compare as numbers do."""
    return f"2026-11-{1 + number // 1440:02}T{number // 60 % 24:02}:{number % 60:02}:07Z-{number:08x}"


def step(
    kind: str, outcome: str, result: Mapping[str, Any], *, minute: int = 0, version: str = "1"
) -> Document:
    """Return a step that took 42 seconds, `minute` minutes after noon."""
    clock = f"2026-11-20T{12 + minute // 60:02}:{minute % 60:02}"
    return {
        "kind": kind,
        "step_key": digest(f"{kind}-{minute}")[:16],
        "attempt": 1,
        "code_version": version,
        "inputs": {"base": "tiny"},
        "outcome": outcome,
        "result": dict(result),
        "started_at": f"{clock}:07Z",
        "finished_at": f"{clock}:49Z",
        "worker": "worker-3",
        "flow_run": f"run-{minute}",
    }


def inspected(says: str = "grouped_by_expert", **more: Any) -> Document:
    """Return an inspected step with two pieces of evidence for one parameter, one for the other."""
    packing = {
        "mlp.experts.gate_up_proj": {
            "value": says,
            "decided_by": "training",
            "evidence": [
                {"source": "training", "says": says, "strength": "strong", "detail": "unsloth_zoo 2026.9.5"},
                {
                    "source": "fingerprint",
                    "says": says,
                    "strength": "medium",
                    "detail": "unsloth_fixed, no marker",
                },
            ],
        },
        "mlp.experts.down_proj": {
            "value": says,
            "decided_by": "marker",
            "evidence": [{"source": "marker", "says": says, "strength": "strong", "detail": "lora_B_layout"}],
        },
    }
    result = {
        "family": "qwen3_moe",
        "layers": 2,
        "experts": 4,
        "ranks": {"routed_experts": 3},
        "orientation": "swapped",
        "packing": packing,
        "pairs": 24,
        "classes": {"routed_experts": {"keys": 48, "trained_fraction": 0.75}},
        "warnings": [],
    }
    return step("inspected", "done", result, **more)


def converted(
    output: str, *, rank: int = 3, max_lora_rank: int = 8, mixed: bool = False, **more: Any
) -> Document:
    """Return a converted step with this output digest."""
    result = {
        "output_digest": output,
        "format": "per-expert",
        "rank": rank,
        "max_lora_rank": max_lora_rank,
        "is_3d_lora_weight": False,
        "needs_mixed_format": mixed,
        "dtype": "float32",
        "pairs": 24,
        "files": [{"name": "adapter_model.safetensors", "bytes": 1234, "sha256": digest(output)}],
        "control": {"output_digest": digest("control " + output), "kind": "other_packing", "files": []},
    }
    return step("converted", "done", result, **more)


def checked(**more: Any) -> Document:
    """Return a checked step with two checks passed."""
    checks = [
        {
            "name": "round_trip",
            "passed": True,
            "detail": "48 of 48 tensors bit for bit",
            "figures": {"tensors": 48},
        },
        {"name": "coverage", "passed": True, "detail": "24 of 24 pairs", "figures": {"pairs": 24}},
    ]
    return step("checked", "done", {"checks": checks}, **more)


def staged(author: str, output: str, **more: Any) -> Document:
    """Return a staged step of this output."""
    prefix = f"serving/{author}/{output}/"
    result = {
        "output_digest": output,
        "prefix": prefix,
        "uri": f"s3://bucket/{prefix}",
    }
    return step("staged", "done", result, **more)


def opponents(authors: Iterable[str], **more: Any) -> Document:
    """Return an opponents step that chose these authors."""
    chosen = [
        {"author": name, "adapter_digest": digest(name), "output_digest": digest("output " + name)}
        for name in authors
    ]
    return step("opponents", "done", {"opponents": chosen, "available": len(chosen)}, **more)


def verdict(
    outcome: str,
    output: str,
    *,
    own: float | None = 2.125,
    base: float | None = 2.375,
    wrong: Mapping[str, float] | None = None,
    code: str | None = None,
    **more: Any,
) -> Document:
    """Return a verdict after scoring; the control sits at 2.25, margins are against the smallest wrong."""
    wrong = {"zeno": 2.3125} if wrong is None else dict(wrong)
    margin = min(wrong.values()) - own if wrong and own is not None else None
    differences = {"control": {"mean": 0.125, "lower": 0.0625, "upper": 0.1875}}
    differences["base"] = {"mean": 0.25, "lower": 0.21875, "upper": 0.28125}
    for name in wrong:
        differences[f"wrong:{name}"] = {"mean": 0.1875, "lower": 0.15625, "upper": 0.21875}
    result = {
        "code": code,
        "codes": [code] if code else [],
        "reason": "own is below base, control and every wrong" if code is None else f"it is {code}",
        "output_digest": output,
        "own": own,
        "base": base,
        "base_again": base,
        "control": 2.25,
        "wrong": wrong,
        "margin": margin,
        "interval": None if margin is None else [margin - 0.03125, margin + 0.03125],
        "differences": differences,
        "units": 40,
        "bytes": 9000,
        "thresholds": {"floor": 0.002},
        "measured_at": "2026-11-20T12:30:00Z",
        "notes": [],
    }
    return step("verdict", outcome, result, **more)


def refused(kind: str, code: str, **more: Any) -> Document:
    """Return a quarantined step of this kind."""
    result = {"code": code, "codes": [code], "reason": f"it is {code}", "where": "layers.0.experts"}
    return step(kind, "quarantined", result, **more)


def halted(kind: str, outcome: str, code: str, **more: Any) -> Document:
    """Return a step that waits or was stopped."""
    return step(kind, outcome, {"code": code, "reason": f"because of {code}"}, **more)


def whole_path(author: str, output: str, **figures: Any) -> list[Document]:
    """Return the steps of an adapter that went all the way to ready."""
    against = figures.get("wrong", {"zeno": 2.3125})
    return [
        inspected(minute=0),
        converted(output, minute=1),
        checked(minute=2),
        staged(author, output, minute=3),
        opponents(against, minute=4),
        step("scored", "done", {"subjects": {"own": [1.5, 2.5]}, "voided": []}, minute=5),
        verdict("ready", output, minute=6, **figures),
    ]


def ledger(
    author: str, name: str, steps: Sequence[Document], *, runs: Mapping[str, int], base: str = "tiny"
) -> Document:
    """Return the ledger of `author`'s adapter `name`, submitted as each of `runs`."""
    verdicts = [
        s
        for s in steps
        if s["kind"] == "verdict" and s["outcome"] in ("ready", "quarantined", "inconclusive")
    ]
    return {
        "schema": 1,
        "author": author,
        "adapter_digest": digest(f"{author} {name}"),
        "base": base,
        "submissions": [{"run": run, "submission": submission(number)} for run, number in runs.items()],
        "claim": None,
        "steps": list(steps),
        "verdict": verdicts[-1] if verdicts else None,
    }


def ready_ledger(
    author: str, name: str = "a", *, number: int = 1, base: str = "tiny", **figures: Any
) -> Document:
    """Return the ledger of an adapter that is ready, submitted once as run `r<number>`."""
    output = digest(f"output {author} {name}")
    return ledger(author, name, whole_path(author, output, **figures), runs={f"r{number}": number}, base=base)


def key_of(document: Document) -> str:
    """Return the key a ledger document has in the store."""
    return f"ledger/{document['author']}/{document['adapter_digest']}.json"


def text(document: Document) -> LedgerText:
    """Return a ledger document as the store would give it; its ETag changes with its content."""
    body = json.dumps(document)
    return LedgerText(key_of(document), digest(body)[:32], body)


def base_text(base: str = "tiny", **more: Any) -> BaseText:
    """Return a registered base."""
    document = {"schema": 1, "aliases": [], "served_model": f"{base}-model", "exclusions": [], **more}
    body = json.dumps(document)
    return BaseText(base, digest(body)[:32], body)
