"""How an adapter that is asked for by version comes from the store into the cache."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from roster.engine_plugin.cache import AdapterCache, Hold, check_manifest
from roster.engine_plugin.refusals import NotFetched, NotIntact, OfAnotherBase
from roster.engine_plugin.versions import Version
from roster.serving import Manifest, ServedFile
from storage.digests import FileDigest
from storage.errors import ObjectNotFound, StorageError
from storage.keys import manifest_key
from storage.s3 import S3Store


@dataclass(frozen=True, slots=True)
class Wanted:
    """An adapter that can be brought."""

    version: Version
    manifest: Manifest


class Fetcher:
    """Brings adapters of one base into a cache. Its methods block; several threads may use it at once."""

    def __init__(self, store: S3Store, cache: AdapterCache, base: str) -> None:
        self._store, self._cache, self._base = store, cache, base

    def look_up(self, version: Version, output_digest: str | None) -> Wanted | None:
        """What a version is; None where nobody has it.

        `output_digest`: the whole digest where the roster tells it; then the store is not asked about what is in the
        cache.
        Raises OfAnotherBase, NotFetched, NotIntact.
        """
        try:
            digest = output_digest or self._find(version)
            if digest is None:
                return None
            manifest = self._cache.read_manifest(digest) or self._read_manifest(version, digest)
        except ObjectNotFound:
            return None
        except (StorageError, OSError) as error:
            raise NotFetched(version.name, str(error)) from error
        except ValidationError as error:
            raise NotFetched(
                version.name, f"its manifest cannot be read: {error.errors()[0]['msg']}"
            ) from error
        check_manifest(version.name, digest, manifest)
        if manifest.base != self._base:
            raise OfAnotherBase(version.name, self._base, manifest.base)
        return Wanted(version, manifest)

    def bring(self, wanted: Wanted, held: Hold) -> int:
        """Verify a held adapter and bring what is missing or damaged of it; returns how many files were brought.

        Raises NotFetched, NotIntact.
        """
        version, manifest = wanted.version, wanted.manifest
        prefix = version.prefix(manifest.output_digest)

        def download(file: ServedFile, path: Path) -> FileDigest:
            info = self._store.head(prefix + file.name)
            if info is None:
                raise ObjectNotFound(prefix + file.name)
            if info.bytes != file.bytes:  # told before it takes room that nobody counted
                raise NotIntact(version.name, file.name, f"{file.bytes} bytes", f"{info.bytes} bytes")
            return self._store.download_file(prefix + file.name, path, if_match=info.etag)

        try:
            return self._cache.fill(held, version.name, manifest, download)
        except (StorageError, OSError) as error:
            raise NotFetched(version.name, str(error)) from error

    def _find(self, version: Version) -> str | None:
        """The whole digest; of several that start alike none, for the name does not say which is meant."""
        found = [name for name in self._store.list_folders(version.folder) if name.startswith(version.digest)]
        return found[0] if len(found) == 1 else None

    def _read_manifest(self, version: Version, digest: str) -> Manifest:
        body = self._store.get(manifest_key(version.prefix(digest))).body
        return Manifest.model_validate_json(body)
