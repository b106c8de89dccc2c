"""A small store with something of everything, and a store that dies at its n-th request."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from store_builders import make_step, make_submission, with_faults

from storage.claims import open_ledger
from storage.documents import utc_now
from storage.errors import ObjectNotFound
from storage.keys import heldout_key, matrix_cell_key, matrix_samples_key, parse_ledger_key
from storage.ledger import Outcome, StepKind
from storage.s3 import S3Store

SPACE, BASE = "0123456789abcdef", "tiny"
SECRET = "what only the author may tell"
_CHANGES = ("put_object", "delete_object")
_CALLS = (*_CHANGES, "get_object", "head_object", "list_objects_v2")


def digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def put_adapter(store: S3Store, author: str, name: str, outcome: Outcome | None, **more: Any) -> str:
    """Stage an adapter, with a ledger that ends so (None: without a verdict), and return its output digest."""
    output = digest(f"{author} {name} output")
    put_staged(store, "serving", author, output)
    ledger = open_ledger(store, author, digest(f"{author} {name}"), BASE, make_submission())
    ledger.claim("a run", 60)
    ledger.append(make_step(StepKind.INSPECTED, text=SECRET, packing={"says": SECRET}))
    ledger.append(
        make_step(StepKind.CONVERTED, output_digest=output, control={"output_digest": digest(output)})
    )
    ledger.append(make_step(StepKind.STAGED, output_digest=output))
    if outcome is not None:
        told = {"code": "no_effect", "codes": ["no_effect"], "reason": "it changes nothing"}
        result = {"output_digest": output, "units": [SECRET]} | (told if outcome is not Outcome.READY else {})
        ledger.append(make_step(StepKind.VERDICT, outcome, **result | more))
    ledger.release()
    return output


def put_staged(store: S3Store, root: str, author: str, output: str) -> None:
    """Put an adapter's three files as a run does, the manifest last."""
    for file in ("adapter_config.json", "adapter_model.safetensors", "manifest.json"):
        store.put(f"{root}/{author}/{output}/{file}", f"{author} {output} {file}".encode())


def put_author(store: S3Store, author: str) -> str:
    """Put an author's upload, held-out text, ready adapter and measurements, and return the output digest."""
    for file in ("adapter_config.json", "adapter_model.safetensors", "_READY.json"):
        store.put(f"uploads/{author}/run-1/{file}", f"{author} {file}".encode())
    output = put_adapter(store, author, "first", Outcome.READY)
    text = f'{{"id": "{author}", "text": "{SECRET}"}}\n'.encode()
    store.put(heldout_key(author, "main"), text)
    store.put(matrix_cell_key(BASE, SPACE, hashlib.sha256(text).hexdigest(), None), b"{}")
    store.put(matrix_cell_key(BASE, SPACE, digest("another text"), output), b"{}")
    samples = {
        "schema": 1,
        "base": BASE,
        "engine_id": SPACE,
        "output_digest": output,
        "max_tokens": 3,
        "temperature": 0.5,
        "samples": [{"unit": SECRET, "seed": 5, "prompt": [7, 11], "ids": [13], "bytes": 2}],
        "sampled_at": "2026-03-01T12:00:00Z",
    }
    store.put(matrix_samples_key(BASE, SPACE, digest(f"samples of {author}")), json.dumps(samples).encode())
    return output


def publish(store: S3Store) -> None:
    """Write a roster of every author whose last verdict is ready, unless the record's last act keeps them out."""
    served: dict[str, Any] = {}
    for found in list(store.list_objects("ledger/")):
        name = parse_ledger_key(found.key)
        if name is None:
            continue
        verdict = json.loads(store.get(found.key).body)["verdict"]
        record = store.head(f"ledger/{name[0]}/_author.json")
        acts = json.loads(store.get(f"ledger/{name[0]}/_author.json").body)["events"] if record else []
        if verdict and verdict["outcome"] == "ready" and not (acts and acts[-1]["act"] != "release"):
            served[name[0]] = served_entry(name[0], verdict["result"]["output_digest"])
    put_roster(store, served)


def served_entry(author: str, output: str) -> dict[str, Any]:
    figures = {
        "own": 2.1,
        "base": 2.4,
        "margin": None,
        "interval": None,
        "measured_at": "2026-03-01T12:00:00Z",
    }
    return {
        "output_digest": output,
        "uri": f"s3://adapters/serving/{author}/{output}/",
        "format": "per-expert",
        "is_3d_lora_weight": False,
        "rank": 3,
        "verdict": figures,
        "stale": False,
    }


def put_roster(
    store: S3Store, served: dict[str, Any], key: str = "roster/current.json", version: int = 7
) -> None:
    engine = {"max_lora_rank": 8, "max_loras": 2, "flags": []}
    bases = {BASE: {"served_model": BASE, "engine": engine, "authors": served}} if served else {}
    told = {"schema": 1, "version": version, "generated_at": "2026-03-01T12:00:00Z", "bases": bases}
    store.put(key, json.dumps(told).encode())


def contents(store: S3Store) -> dict[str, bytes]:
    """Everything in the store."""
    return {found.key: store.get(found.key).body for found in store.list_objects("")}


def check_servable(store: S3Store) -> None:
    """Whatever the roster names is whole, and nothing has a manifest without its files."""
    keys = set(contents(store))
    for key in keys:
        if key.endswith("manifest.json"):
            prefix = key.removesuffix("manifest.json")
            assert {f"{prefix}adapter_config.json", f"{prefix}adapter_model.safetensors"} <= keys, key
    if "roster/current.json" not in keys:
        return
    for base in json.loads(store.get("roster/current.json").body)["bases"].values():
        for author, entry in base["authors"].items():
            assert f"serving/{author}/{entry['output_digest']}/manifest.json" in keys, author


class Killed(BaseException):
    """The process ended here."""


def dying(store: S3Store, *, after: int) -> S3Store:
    """Return the store as a process sees it that is killed once it has changed so many objects.

    A put of the bytes that are there already is no change. Nothing of that process goes on, whichever thread it is in.
    """
    lock, done = threading.Lock(), 0

    def call(name: str) -> Callable[..., Any]:
        real = getattr(store._client, name)

        def count(*args: Any, **more: Any) -> Any:
            nonlocal done
            with lock:
                if done >= after:
                    raise Killed
                changes = name in _CHANGES and not _is_there(store, more)
                answer = real(*args, **more)
                done += changes
                return answer

        return count

    return with_faults(store, **{name: call(name) for name in _CALLS})


def _is_there(store: S3Store, request: dict[str, Any]) -> bool:
    if "Body" not in request:
        return False
    try:
        return bool(store.get(request["Key"]).body == request["Body"])
    except ObjectNotFound:
        return False


def expire_claims(store: S3Store) -> None:
    """Let every claim run out, as time does."""
    for found in list(store.list_objects("ledger/")):
        body = json.loads(store.get(found.key).body)
        if body.get("claim"):
            body["claim"]["expires_at"] = (utc_now() - timedelta(seconds=5)).strftime("%Y-%m-%dT%H:%M:%SZ")
            store.put(found.key, json.dumps(body).encode())
