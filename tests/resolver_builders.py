"""What the resolver's tests publish: converted adapters under serving/, and rosters that name them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from roster.serving import Manifest, Roster, RosterAuthor, RosterBase, RosterEngine, ServedFile
from storage.digests import directory_digest, sha256_file
from storage.keys import control_prefix, manifest_key, roster_key, serving_prefix
from storage.s3 import S3Store

REPOSITORY = Path(__file__).resolve().parents[1]
NOON = "2026-11-20T12:00:00Z"


@dataclass(frozen=True)
class Published:
    """An adapter in the store."""

    author: str
    digest: str
    prefix: str
    folder: Path
    is_3d: bool

    @property
    def version(self) -> str:
        return f"{self.author}@{self.digest[:16]}"


def publish_adapter(
    store: S3Store,
    author: str,
    folder: Path,
    *,
    base: str = "tiny",
    is_3d: bool = False,
    control: bool = False,
    changes: Mapping[str, object] | None = None,
) -> Published:
    """Put the files of a directory and their manifest where the pipeline puts them, the manifest last.

    changes: what the manifest says besides.
    """
    files = [sha256_file(path) for path in sorted(folder.iterdir()) if path.is_file()]
    digest = directory_digest(files)
    prefix = (control_prefix if control else serving_prefix)(author, digest)
    document = json.loads((REPOSITORY / "docs" / "examples" / "manifest.json").read_text())
    document |= {"author": author, "base": base, "output_digest": digest, "is_3d_lora_weight": is_3d}
    document |= changes or {}
    document["rank"] = json.loads((folder / "adapter_config.json").read_text())["r"]
    document["files"] = [ServedFile(name=f.name, bytes=f.bytes, sha256=f.sha256).model_dump() for f in files]
    for file in files:
        store.upload_file(folder / file.name, prefix + file.name, sha256=file.sha256)
    store.put(manifest_key(prefix), Manifest.model_validate(document).model_dump_json().encode())
    return Published(author, digest, prefix, folder, is_3d)


class Publisher:
    """The store's roster: each `publish` is its next version."""

    def __init__(self, store: S3Store) -> None:
        self.store, self.version = store, 0

    def publish(self, *served: Published, elsewhere: Mapping[str, Published] | None = None) -> None:
        """Serve exactly these on the base `tiny`, and those of `elsewhere` on the bases that are its keys."""
        self.version += 1
        bases = {"tiny": _on_base(*served)} if served else {}
        bases |= {base: _on_base(one) for base, one in (elsewhere or {}).items()}
        roster = Roster(version=self.version, generated_at=NOON, bases=bases)
        self.store.put(roster_key(), roster.model_dump_json().encode())


def _on_base(*served: Published) -> RosterBase:
    example = Roster.model_validate_json((REPOSITORY / "docs" / "examples" / "roster.json").read_bytes())
    pattern: RosterAuthor = next(iter(next(iter(example.bases.values())).authors.values()))
    return RosterBase(
        served_model="tiny",
        engine=RosterEngine(max_lora_rank=8, max_loras=2, flags=()),
        authors={
            one.author: pattern.model_copy(
                update={"output_digest": one.digest, "uri": one.prefix, "is_3d_lora_weight": one.is_3d}
            )
            for one in served
        },
    )
