"""A published roster with its staged adapters in a store, and a server that takes adapters as vLLM does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripted_server import Answer, ScriptedServer

from storage.bases import BaseDocument, BaseEngine, TargetFormat, register_base
from storage.s3 import S3Store

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"


def staged_digest(files: Mapping[str, bytes]) -> str:
    """sha256 over the lines `<sha256> <file name>`, sorted by name."""
    lines = "".join(f"{hashlib.sha256(files[name]).hexdigest()} {name}\n" for name in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()


def stage(store: S3Store, author: str, files: Mapping[str, bytes], *, is_3d: bool = False) -> str:
    """Put a converted adapter and its manifest under serving/; returns its output digest."""
    digest = staged_digest(files)
    for name, content in files.items():
        store.put(f"serving/{author}/{digest}/{name}", content)
    manifest = json.loads((EXAMPLES / "manifest.json").read_text())
    manifest |= {"author": author, "output_digest": digest, "is_3d_lora_weight": is_3d}
    manifest["files"] = [
        {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
    ]
    store.put(f"serving/{author}/{digest}/manifest.json", json.dumps(manifest).encode())
    return digest


def publish(store: S3Store, bases: Mapping[str, Mapping[str, str]], **engine: Any) -> None:
    """Register the bases and put a roster that serves author → output digest on each; `engine` changes its advice.

    An author whose name ends in "-3d" is served stacked.
    """
    example = json.loads((EXAMPLES / "roster.json").read_text())
    (pattern,) = example["bases"].values()
    one = pattern["authors"]["anna"]
    example["bases"] = {
        base: {
            "served_model": f"model-{base}",
            "engine": pattern["engine"] | engine,
            "authors": {
                author: {**one, "output_digest": digest, "is_3d_lora_weight": author.endswith("-3d")}
                for author, digest in authors.items()
            },
        }
        for base, authors in bases.items()
        if authors
    }
    for base in bases:
        document = BaseDocument(
            base=base,
            served_model=f"model-{base}",
            weights_digest=None,
            engine=BaseEngine(),
            target_format=TargetFormat.PER_EXPERT,
        )
        register_base(store, b"{}", document)
    store.put("roster/current.json", json.dumps(example).encode())


class PushedServer(ScriptedServer):
    """A server on loopback that refuses a name twice, as vLLM does, and remembers what it was asked to do.

    `deaf`: it knows none of the routes for adapters, as without VLLM_ALLOW_RUNTIME_LORA_UPDATING.
    """

    def __init__(self, *models: str, refuse: Mapping[str, str] | None = None, deaf: bool = False) -> None:
        super().__init__(models, 2.0, lambda *_: None, refuse or {})
        self.deaf = deaf
        self.orders: list[tuple[str, str, str, bool]] = []

    def answer(self, path: str, body: dict[str, Any]) -> Answer | None:
        """What goes out for a request."""
        if path.endswith("lora_adapter"):
            if self.deaf:
                return 404, {"detail": "Not Found"}
            what = path.removeprefix("/v1/").removesuffix("_lora_adapter")
            name, at, is_3d = body["lora_name"], body.get("lora_path", ""), body.get("is_3d_lora_weight")
            self.orders.append((what, name, at, bool(is_3d)))
            if what == "load" and not any(name.startswith(start) for start in self.refuse):
                if name in self.loaded:
                    return 400, {"error": {"message": f"'{name}' has already been loaded"}}
                if not Path(at).is_dir():
                    return 404, {"error": {"message": f"No adapter found for {name} at {at}"}}
        return super().answer(path, body)
