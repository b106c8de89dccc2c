"""Which adapter answers a request, and what of the cache vLLM knows: the part of the resolver that is not vLLM's.

All of it runs in the API server's event loop, but for what it hands to threads. vLLM's own table of loaded adapters
(`loaded`, by name) is the one thing shared with vLLM, which loads through `fetch` and is told through `forget`.
"""

import asyncio
import logging
import time
import weakref
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from roster.engine_plugin.cache import MANIFEST, AdapterCache, Entry, Hold
from roster.engine_plugin.fetching import Fetcher, Wanted
from roster.engine_plugin.popularity import Popularity
from roster.engine_plugin.refusals import NoRosterYet, NotFetched, NotIntact, NotServed, Refusal, ServerLacks
from roster.engine_plugin.roster_source import RosterSource
from roster.engine_plugin.versions import Version, parse_version, roster_version
from roster.serving import TORCH_DTYPES, AdapterFormat, Manifest, RosterAuthor, smallest_max_lora_rank

QUIET_S = 2.0
"""An adapter counts as used for so long after its last request ended: vLLM may hear of an abort a moment late."""

UNLISTED_S = 3600.0
"""An adapter that the roster does not name leaves the cache so long after its last use, though there be room."""

_LOOK_S = 60.0
_FETCHES = 16
_REMOVAL_S = 0.02

_LOG = logging.getLogger("vllm.adapter_roster")


class Loaded(Protocol):
    """vLLM's LoRARequest, as far as it matters here."""

    lora_int_id: int
    lora_path: str


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What a server was started for: --max-lora-rank, and whether with --enable-mixed-moe-lora-format.

    slots_dtype: of adapters in the format `slots`, as torch calls it; None where no plugin loads such adapters.
    """

    max_lora_rank: int
    mixed_format: bool
    slots_dtype: str | None = None


@dataclass(slots=True)
class _Known:
    """An adapter that vLLM was or will be told of."""

    held: Hold
    wanted: Wanted
    loaded: Loaded | None = None
    mending: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True, weakref_slot=True)
class _Users:
    """The requests for an adapter that are not over yet, and when the last of the others ended."""

    requests: dict[int, weakref.ref[object]] = field(default_factory=dict)
    left_at: float = 0.0


class AuthorServing:
    """Serves the authors of one base by name. `limit_bytes` bounds the cache; `warm`: the busiest so many stay loaded.

    `limits`: what the server was started for; an adapter that needs more is not loaded.
    `forget` has the engine forget an adapter by its number.
    """

    def __init__(
        self,
        source: RosterSource,
        cache: AdapterCache,
        fetcher: Fetcher,
        popularity: Popularity,
        loaded: MutableMapping[str, Loaded],
        forget: Callable[[int], Awaitable[object]],
        *,
        limits: ServerLimits,
        limit_bytes: int,
        candidates: bool,
        warm: int,
    ) -> None:
        self._limits = limits
        self.source, self._cache, self._fetcher, self._popularity = source, cache, fetcher, popularity
        self._loaded, self._forget = loaded, forget
        self._limit_bytes, self._candidates, self._warm = limit_bytes, candidates, warm
        self._known: dict[str, _Known] = {}
        self._users: dict[str, _Users] = {}
        self._coming: dict[str, int] = {}
        self._looked_at = time.monotonic()
        self._not_ahead: set[str] = set()
        # Of its own: a slow store that kept the event loop's few threads would keep the roster from being read.
        self._fetching = ThreadPoolExecutor(_FETCHES, thread_name_prefix="adapter-roster")

    async def prepare(self, name: str, request: object) -> str:
        """The name under which vLLM has to answer a request for `name`, which is no name of the base's.

        The adapter stays until `request`, any object that lives as long as the request, is gone.
        Raises NotServed, NoRosterYet, NotFetched, NotIntact, OfAnotherBase.
        """
        version = self._choose(name)
        if version is None:
            return name
        self._use(version.name, request)
        known = self._known.get(version.name)
        if known is not None and not known.held.is_intact():
            await self._mend(version, known)
        return version.name

    def owns(self, name: str) -> bool:
        """Whether what vLLM has loaded under this name is from the cache."""
        known, loaded = self._known.get(name), self._loaded.get(name)
        return known is not None and loaded is not None and loaded.lora_path == str(known.held.path)

    def is_from_elsewhere(self, name: str) -> bool:
        """Whether vLLM has something loaded under this name that is not from the cache."""
        return name in self._loaded and not self.owns(name)

    async def fetch(self, version: Version) -> Wanted | None:
        """The adapter of a version, verified on disk and held; None where nobody has it.

        Raises NotFetched, NotIntact, OfAnotherBase, ServerLacks.
        """
        listed = None if version.control else self.source.find(version.author)
        digest = None
        if listed is not None and listed.output_digest.startswith(version.digest):
            digest = listed.output_digest
        in_thread = asyncio.get_running_loop().run_in_executor
        wanted = await in_thread(self._fetching, self._fetcher.look_up, version, digest)
        if wanted is None:
            if digest is not None:
                raise NotFetched(version.name, f"{version.prefix(digest)} is not in the object store")
            return None
        if listed is not None and digest is not None:
            _check_declaration(version.name, listed, wanted.manifest)
        _check_limits(version.name, self._limits, wanted.manifest)
        digest = wanted.manifest.output_digest
        held = await self._hold(version.name, digest)
        try:
            await self._make_room(version.name, digest, self._cache.count_missing(wanted.manifest))
            brought = await in_thread(self._fetching, self._fetcher.bring, wanted, held)
        except BaseException:
            held.release()
            raise
        finally:
            self._coming.pop(digest, None)
        if brought:
            _LOG.info("adapter-roster: fetched %s (%d files)", version.name, brought)
        before = self._known.get(version.name)
        self._known[version.name] = _Known(held, wanted)
        if before is not None:
            before.held.release()
        return wanted

    def path_of(self, version: Version) -> str:
        """The folder of a fetched adapter."""
        return str(self._known[version.name].held.path)

    def note_loading(self, version: Version, loaded: Loaded) -> None:
        """Remember what vLLM is given of a fetched adapter; its number is vLLM's to set."""
        self._known[version.name].loaded = loaded

    async def refresh(self) -> None:
        """Have the newest roster."""
        await asyncio.to_thread(self.source.refresh)

    async def keep_up(self, load: Callable[[str], Awaitable[object]]) -> None:
        """What is due every few seconds besides the roster: adapters nobody needs any more, the busiest, the counts.

        `load` has vLLM load an adapter by its version's name. It may take as long as fetching takes.
        """
        try:
            if time.monotonic() - self._looked_at > _LOOK_S:
                self._looked_at = time.monotonic()
                await self._drop_unlisted()
        except OSError as error:
            _LOG.warning("adapter-roster: the cache could not be tidied: %s", error)
        await self._load_busiest(load)
        await asyncio.to_thread(self._popularity.save)

    def _choose(self, name: str) -> Version | None:
        """The version that a name stands for now; None for an adapter that others had vLLM load."""
        listed = self.source.find(name)
        if listed is not None:
            self._popularity.add(name)
            version = roster_version(name, listed.output_digest)
            if self.is_from_elsewhere(version.name):
                # Scoring loads the same bytes from folders that it removes; no author is served from those.
                del self._loaded[version.name]
            return version
        if self.is_from_elsewhere(name):
            return None
        asked = parse_version(name)
        if asked is not None and (self._candidates or self._is_listed(asked)):
            return asked
        if self.source.roster is None and not self.source.is_known_empty:
            raise NoRosterYet(name, self.source.trouble)
        raise NotServed(name, self.source.base, self.source.explain(name))

    def _is_listed(self, version: Version) -> bool:
        listed = self.source.find(version.author)
        return listed is not None and roster_version(version.author, listed.output_digest) == version

    def _use(self, name: str, request: object) -> None:
        users = self._users.setdefault(name, _Users())

        def leave(reference: weakref.ref[object]) -> None:
            users.requests.pop(id(reference), None)
            users.left_at = time.monotonic()

        reference = weakref.ref(request, leave)
        users.requests[id(reference)] = reference
        known = self._known.get(name)
        if known is not None:
            known.held.note_use()

    def _is_used(self, name: str) -> bool:
        users = self._users.get(name)
        return users is not None and (bool(users.requests) or time.monotonic() - users.left_at < QUIET_S)

    async def _mend(self, version: Version, known: _Known) -> None:
        """Bring again what changed on disk of an adapter that vLLM knows; it may read it again at any moment."""
        async with known.mending:
            if known.held.is_intact():
                return
            _LOG.warning("adapter-roster: the files of %s changed on disk; they are verified", version.name)
            in_thread = asyncio.get_running_loop().run_in_executor
            brought = await in_thread(self._fetching, self._fetcher.bring, known.wanted, known.held)
            _LOG.warning("adapter-roster: %d files of %s were fetched again", brought, version.name)

    async def _hold(self, name: str, digest: str) -> Hold:
        # In no thread: what a cancelled request leaves in one is held for ever.
        while True:
            try:
                return self._cache.hold(digest)
            except BlockingIOError:
                await asyncio.sleep(_REMOVAL_S)
            except OSError as error:
                raise NotFetched(name, str(error)) from error

    async def _make_room(self, name: str, digest: str, size: int) -> None:
        """Have `size` bytes free within the bound, and keep them for this adapter until it is there.

        Raises NotFetched when what is in use leaves no room.
        """
        self._coming[digest] = size
        try:
            if await self._has_room() or not size:
                return
            await asyncio.sleep(QUIET_S)  # what was used a moment ago may leave then
            has_room = await self._has_room()
        except OSError as error:
            raise NotFetched(name, str(error)) from error
        if not has_room:
            raise NotFetched(
                name,
                f"it takes {size} bytes, and the cache of {self._limit_bytes} bytes has no room beside what is in use: "
                "ADAPTER_ROSTER_CACHE_BYTES may be larger",
            )

    async def _has_room(self) -> bool:
        """Remove what may leave until what is here and what is coming keep the bound; tells whether they do."""
        entries = await asyncio.to_thread(self._cache.list_entries)
        served = self.source.digests()
        total = sum(entry.bytes for entry in entries) + sum(self._coming.values())
        for entry in sorted(entries, key=lambda entry: entry.digest in served):
            if total <= self._limit_bytes:
                break
            if entry.digest not in self._coming and await self._evict(entry):
                total -= entry.bytes
        return total <= self._limit_bytes

    async def _evict(self, entry: Entry) -> bool:
        """Remove an adapter that no request uses, once vLLM knows it no more; tells whether it is gone."""
        names = [name for name, known in self._known.items() if known.held.digest == entry.digest]
        if any(self._is_used(name) for name in names):
            return False
        leaving = []
        for name in names:  # no request comes in between: nothing here waits
            if self.owns(name):
                del self._loaded[name]
            leaving.append(self._known.pop(name))
            self._users.pop(name, None)
        for known in leaving:
            if known.loaded is not None:
                await self._forget(known.loaded.lora_int_id)
            known.held.release()
        gone = await asyncio.to_thread(self._cache.remove, entry.digest)
        if gone:
            _LOG.info("adapter-roster: removed %s from the cache", ", ".join(names) or entry.digest)
        return gone

    async def _drop_unlisted(self) -> None:
        for name in [name for name in self._users if name not in self._known and not self._is_used(name)]:
            del self._users[name]
        if self.source.roster is None:
            return
        entries = await asyncio.to_thread(self._cache.list_entries)
        served = self.source.digests()
        for entry in entries:
            if entry.digest not in served and time.time() - entry.used_at > UNLISTED_S:
                await self._evict(entry)

    async def _load_busiest(self, load: Callable[[str], Awaitable[object]]) -> None:
        for author in self._popularity.busiest(self._warm):
            listed = self.source.find(author)
            if listed is None:
                continue
            name = roster_version(author, listed.output_digest).name
            if name in self._loaded or name in self._not_ahead:
                continue
            self._not_ahead.add(name)  # tried once: each try has all requests wait
            meanwhile = _Users()
            self._use(name, meanwhile)
            try:
                await load(name)
            except Refusal as refusal:
                _LOG.warning("adapter-roster: %s was not loaded ahead: %s", name, refusal)


def _check_declaration(name: str, listed: RosterAuthor, manifest: Manifest) -> None:
    """Raise NotIntact where roster and manifest disagree about the form: vLLM trusts what it is told, without a look.

    Source: vllm/lora/request.py (`is_3d_lora_weight`), vLLM 0.32.0.
    """
    said = [f"is_3d_lora_weight {one.is_3d_lora_weight}" for one in (listed, manifest)]
    if said[0] != said[1]:
        raise NotIntact(name, MANIFEST, f"{said[0]}, as the roster says", said[1])


def _check_limits(name: str, limits: ServerLimits, manifest: Manifest) -> None:
    """Raise ServerLacks where the server was not started for such an adapter."""
    if manifest.rank > limits.max_lora_rank:
        legal = smallest_max_lora_rank(name, manifest.rank)
        raise ServerLacks(name, f"--max-lora-rank {legal}", f"with {limits.max_lora_rank}")
    if manifest.needs_mixed_format and not limits.mixed_format:
        raise ServerLacks(name, "--enable-mixed-moe-lora-format", "without it")
    if manifest.format is not AdapterFormat.SLOTS:
        return
    if limits.slots_dtype is None:
        raise ServerLacks(name, "the plugin adapter_roster_slots (see VLLM_PLUGINS)", "without it")
    dtype = TORCH_DTYPES.get(manifest.dtype, manifest.dtype)
    if dtype != limits.slots_dtype:
        raise ServerLacks(name, f"--lora-dtype {dtype}", f"with {limits.slots_dtype}")
