"""The resolver without vLLM: the roster that it follows, its cache, what it takes for room, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import pickle  # noqa: TID251 - errors cross process borders this way
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError
from hypothesis import given
from hypothesis import strategies as st
from resolver_builders import Published, Publisher, publish_adapter
from store_builders import failing, make_adapter_directory, memory_store, with_faults

from roster.engine_plugin import author_serving, errors, refusals, resolver
from roster.engine_plugin.author_serving import AuthorServing, ServerLimits
from roster.engine_plugin.cache import AdapterCache
from roster.engine_plugin.fetching import Fetcher
from roster.engine_plugin.popularity import Popularity
from roster.engine_plugin.roster_source import RosterSource
from roster.engine_plugin.settings import PluginSettings
from roster.engine_plugin.versions import Version, parse_version, roster_version
from storage.s3 import S3Store

pytestmark = pytest.mark.real

WEIGHTS = "adapter_model.safetensors"
LIMITS = ServerLimits(max_lora_rank=8, mixed_format=False)
DOWN = EndpointConnectionError(endpoint_url="http://store")


class Asked:
    """A request, which lives as long as something holds it."""


@dataclass
class Server:
    """A vLLM that keeps a table of what it has loaded, as `OpenAIServingModels.resolve_lora` does."""

    store: S3Store
    folder: Path
    limits: ServerLimits = LIMITS
    limit_bytes: int = 1 << 30
    candidates: bool = True
    warm: int = 0
    loaded: dict[str, Any] = field(default_factory=dict)
    forgotten: list[int] = field(default_factory=list)
    loads: int = 0

    def __post_init__(self) -> None:
        cache = AdapterCache(self.folder)
        self.source = RosterSource(self.store, "tiny", self.folder / "roster.json")
        self.popularity = Popularity(self.folder / "requests.json")
        self.authors = AuthorServing(
            self.source,
            cache,
            Fetcher(self.store, cache, "tiny"),
            self.popularity,
            self.loaded,
            self.forget,
            limits=self.limits,
            limit_bytes=self.limit_bytes,
            candidates=self.candidates,
            warm=self.warm,
        )
        self.locks: dict[str, asyncio.Lock] = {}
        self.source.refresh()

    async def forget(self, number: int) -> None:
        self.forgotten.append(number)

    async def load(self, name: str) -> Any:
        async with self.locks.setdefault(name, asyncio.Lock()):
            if name in self.loaded:
                return self.loaded[name]
            version = parse_version(name)
            assert version is not None
            wanted = await self.authors.fetch(version)
            if wanted is None:
                return None
            self.loads += 1
            one = SimpleNamespace(lora_int_id=self.loads, lora_path=self.authors.path_of(version))
            self.authors.note_loading(version, one)
            self.loaded[name] = one
            return one

    async def answer(self, model: str, request: object | None = None) -> str:
        """The version that answers, loaded; an empty string for one that nobody has."""
        name = await self.authors.prepare(model, request or Asked())
        one = await self.load(name)
        return name if one is not None else ""

    def ask(self, model: str) -> str:
        return asyncio.run(self.answer(model))


@pytest.fixture
def store() -> Iterator[S3Store]:
    with memory_store() as opened:
        yield opened


@pytest.fixture
def publisher(store: S3Store) -> Publisher:
    return Publisher(store)


@pytest.fixture(autouse=True)
def no_quiet_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(author_serving, "QUIET_S", 0.0)


def put(store: S3Store, folder: Path, author: str, seed: int = 7, **more: Any) -> Published:
    directory = folder / f"{author}-{seed}"
    make_adapter_directory(directory, seed=seed)
    for name in ("optimizer.pt", "README.md"):
        (directory / name).unlink()
    return publish_adapter(store, author, directory, **more)


def adapters(server: Server) -> set[str]:
    return {path.name for path in (server.folder / "adapters").iterdir()}


@given(
    st.builds(
        Version,
        author=st.from_regex(r"[a-z0-9][a-z0-9._-]{0,63}", fullmatch=True),
        digest=st.from_regex(r"[0-9a-f]{16}", fullmatch=True),
        control=st.booleans(),
    )
)
def test_version_names_round_trip(version: Version) -> None:
    assert parse_version(version.name) == version
    assert roster_version(version.author, version.digest + "f" * 48) == Version(
        version.author, version.digest
    )


@pytest.mark.parametrize(
    "name", ["ada", "ada@", "Ada@" + "a" * 16, "ada@" + "a" * 17, "../x@" + "a" * 16, "a/b@" + "a" * 16, ""]
)
def test_other_names_are_no_versions(name: str) -> None:
    assert parse_version(name) is None


def test_an_author_is_answered_by_the_roster_version_of_that_moment(
    store: S3Store, publisher: Publisher, tmp_path: Path
) -> None:
    old, new = put(store, tmp_path, "ada", 1), put(store, tmp_path, "ada", 2)
    publisher.publish(old)
    server = Server(store, tmp_path / "cache")
    assert server.ask("ada") == old.version != new.version
    publisher.publish(new)
    assert server.ask("ada") == old.version, "nobody looked yet"
    server.source.refresh()
    assert server.ask("ada") == new.version
    assert server.ask(old.version) == old.version, "it may still be asked for by version"
    paths = {Path(one.lora_path).name for one in server.loaded.values()}
    assert paths == {old.digest, new.digest} and server.loads == 2
    weights = (tmp_path / "cache" / "adapters" / new.digest / WEIGHTS).read_bytes()
    assert weights == (new.folder / WEIGHTS).read_bytes() != (old.folder / WEIGHTS).read_bytes()


def test_who_is_not_in_the_roster_is_refused(store: S3Store, publisher: Publisher, tmp_path: Path) -> None:
    ada = put(store, tmp_path, "ada")
    server = Server(store, tmp_path / "cache", candidates=False)
    with pytest.raises(refusals.NotServed, match="nobody has published a roster"):
        server.ask("ada")
    publisher.publish(elsewhere={"other": ada})
    server.source.refresh()
    with pytest.raises(refusals.NotServed) as caught:
        server.ask("ada")
    for fact in ("`ada`", "tiny", "roster version 1", "but on other", "roster why ada"):
        assert fact in str(caught.value)
    for name in ("nobody", ada.version, f"ada~control@{ada.digest[:16]}"):
        with pytest.raises(refusals.NotServed, match="does not name it"):
            server.ask(name)
    assert server.loads == 0


def test_without_candidates_a_hold_hides_a_loaded_version(
    store: S3Store, publisher: Publisher, tmp_path: Path
) -> None:
    ada = put(store, tmp_path, "ada")
    publisher.publish(ada)
    server = Server(store, tmp_path / "cache", candidates=False)
    assert server.ask(ada.version) == server.ask("ada") == ada.version
    publisher.publish()
    server.source.refresh()
    for name in ("ada", ada.version):
        with pytest.raises(refusals.NotServed):
            server.ask(name)


def test_candidates_and_controls_are_found_by_their_version(
    store: S3Store, publisher: Publisher, tmp_path: Path
) -> None:
    own, control = put(store, tmp_path, "ada", 1), put(store, tmp_path, "ada", 2, control=True)
    foreign = put(store, tmp_path, "bob", 3, base="other")
    publisher.publish()
    server = Server(store, tmp_path / "cache")
    assert server.ask(own.version) == own.version
    name = f"ada~control@{control.digest[:16]}"
    assert server.ask(name) == name
    assert server.ask(control.version) == "", "a control is no adapter of its author's"
    with pytest.raises(
        refusals.OfAnotherBase, match=r"`bob@.* is an adapter of other; this server serves tiny"
    ):
        server.ask(foreign.version)


def test_what_others_had_vllm_load_keeps_its_name_but_serves_no_author(
    store: S3Store, publisher: Publisher, tmp_path: Path
) -> None:
    """Scoring loads the bytes of a version from a folder that it removes."""
    ada = put(store, tmp_path, "ada")
    publisher.publish()
    server = Server(store, tmp_path / "cache", candidates=False)
    server.loaded |= {
        name: SimpleNamespace(lora_int_id=90, lora_path="/scratch") for name in (ada.version, "own-name")
    }
    assert server.ask("own-name") == "own-name" and server.ask(ada.version) == ada.version
    assert not server.authors.owns(ada.version)
    publisher.publish(ada)
    server.source.refresh()
    assert server.ask("ada") == ada.version
    assert server.loaded[ada.version].lora_path == str(tmp_path / "cache" / "adapters" / ada.digest)
    assert server.authors.owns(ada.version)


def test_first_requests_at_once_load_once(store: S3Store, publisher: Publisher, tmp_path: Path) -> None:
    ada = put(store, tmp_path, "ada")
    publisher.publish(ada)
    server = Server(store, tmp_path / "cache")

    async def all_at_once() -> list[str]:
        return await asyncio.gather(*(server.answer("ada") for _ in range(5)))

    assert asyncio.run(all_at_once()) == [ada.version] * 5
    assert server.loads == 1


def test_the_cache_keeps_its_bound_and_gives_up_what_was_used_last(
    store: S3Store, publisher: Publisher, tmp_path: Path
) -> None:
    served = [put(store, tmp_path, author, seed) for seed, author in enumerate(("ada", "bob", "cleo"), 1)]
    old = put(store, tmp_path, "ada", 9)
    publisher.publish(*served)
    server = Server(store, tmp_path / "cache", limit_bytes=230_000)  # three, with their manifests

    async def use() -> None:
        await server.answer(old.version)
        for one in served[:2]:
            await server.answer(one.author)
        assert adapters(server) == {old.digest, served[0].digest, served[1].digest}
        await server.answer("cleo")
        assert adapters(server) == {one.digest for one in served}, "what the roster does not name goes first"
        assert server.forgotten == [1] and old.version not in server.loaded
        for author in ("bob", "cleo"):
            await server.answer(author)
        await server.answer(old.version)
        assert adapters(server) == {old.digest, served[1].digest, served[2].digest}
        assert server.forgotten == [1, 2] and served[0].version not in server.loaded

    asyncio.run(use())


def test_nothing_leaves_the_cache_while_a_request_uses_it(
    store: S3Store, publisher: Publisher, tmp_path: Path
) -> None:
    ada, bob = put(store, tmp_path, "ada", 1), put(store, tmp_path, "bob", 2)
    publisher.publish(ada, bob)
    server = Server(store, tmp_path / "cache", limit_bytes=100_000)

    async def use() -> None:
        running = Asked()
        await server.answer("ada", running)
        with pytest.raises(refusals.NotFetched) as caught:
            await server.answer("bob")
        for fact in (bob.version, "takes 700", "100000 bytes", "ADAPTER_ROSTER_CACHE_BYTES"):
            assert fact in str(caught.value)
        assert adapters(server) == {ada.digest} and server.forgotten == []
        del running
        await server.answer("bob")
        assert adapters(server) == {bob.digest} and server.forgotten == [1]

    asyncio.run(use())


def test_nothing_leaves_the_cache_while_another_server_knows_it(
    store: S3Store, publisher: Publisher, tmp_path: Path
) -> None:
    ada, bob = put(store, tmp_path, "ada", 1), put(store, tmp_path, "bob", 2)
    publisher.publish(ada, bob)
    program = (
        "import sys; from pathlib import Path; from roster.engine_plugin.cache import AdapterCache\n"
        "held = AdapterCache(Path(sys.argv[1])).hold(sys.argv[2]); print('held', flush=True); sys.stdin.read()"
    )
    server = Server(store, tmp_path / "cache", limit_bytes=100_000)
    server.ask("ada")
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(server.folder), ada.digest],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(refusals.NotFetched, match="no room"):
            server.ask("bob")
        assert adapters(server) == {ada.digest}
    finally:
        other.kill()
        other.communicate()
    assert server.ask("bob") == bob.version and adapters(server) == {bob.digest}


def test_damage_on_disk_is_mended_from_the_store(
    store: S3Store, publisher: Publisher, tmp_path: Path
) -> None:
    ada = put(store, tmp_path, "ada")
    publisher.publish(ada)
    server = Server(store, tmp_path / "cache")
    server.ask("ada")
    weights = server.folder / "adapters" / ada.digest / WEIGHTS
    right = weights.read_bytes()
    for wrong in (right[:-1], right[:-1] + bytes([right[-1] ^ 1]), b""):
        weights.write_bytes(wrong)
        assert server.ask("ada") == ada.version
        assert weights.read_bytes() == right and server.loads == 1
    weights.write_bytes(b"wrong")
    manifest = weights.parent / "manifest.json"
    said = manifest.read_text()
    for wrong_manifest in ("{", said.replace(ada.digest, "0" * 64), said.replace(WEIGHTS, "other")):
        assert wrong_manifest != said
        manifest.write_text(wrong_manifest)
        later = Server(store, server.folder)
        assert later.ask("ada") == ada.version, "a server that comes up verifies what it finds"
        assert weights.read_bytes() == right and manifest.read_text() == said


def test_damage_in_the_store_is_not_served(store: S3Store, publisher: Publisher, tmp_path: Path) -> None:
    ada, bob = put(store, tmp_path, "ada", 1), put(store, tmp_path, "bob", 2)
    publisher.publish(ada, bob)
    server = Server(store, tmp_path / "cache")
    store.put(ada.prefix + WEIGHTS, b"wrong")
    with pytest.raises(refusals.NotIntact) as caught:
        server.ask("ada")
    for fact in (ada.version, WEIGHTS, "70001 bytes", "5 bytes", "onboarded again"):
        assert fact in str(caught.value)
    manifest = json.loads(store.get(bob.prefix + "manifest.json").body)
    for name, expected in (
        *((name, "plain file names") for name in ("../../escaped", "", "a\nb", "x" * 300 + "/")),
        (WEIGHTS, "files that make the digest"),
    ):
        changed = {**manifest["files"][1], "name": name, "sha256": "0" * 64}
        body = json.dumps(manifest | {"files": [manifest["files"][0], changed]})
        store.put(bob.prefix + "manifest.json", body.encode())
        with pytest.raises(refusals.NotIntact, match=rf"manifest\.json should have {expected}"):
            server.ask("bob")
    store.put(bob.prefix + "manifest.json", b"{}")
    with pytest.raises(refusals.NotFetched, match="manifest cannot be read"):
        server.ask("bob")
    assert adapters(server) == set(), "whole or not at all"
    store.delete(bob.prefix + "manifest.json")
    with pytest.raises(refusals.NotFetched, match="is not in the object store"):
        server.ask("bob")


def test_another_adapters_manifest_does_not_answer_for_this_one(
    store: S3Store, publisher: Publisher, tmp_path: Path
) -> None:
    """Whole and intact, but not what the roster names: those bytes have another name."""
    other, ada = put(store, tmp_path, "ada", 1), put(store, tmp_path, "ada", 2)
    publisher.publish(ada)
    store.put(ada.prefix + "manifest.json", store.get(other.prefix + "manifest.json").body)
    server = Server(store, tmp_path / "cache")
    with pytest.raises(refusals.NotIntact, match=f"make the digest {ada.digest}, found {other.digest}"):
        server.ask("ada")
    assert server.loads == 0 and adapters(server) == set()


# https://github.com/vllm-project/vllm/pull/42242: with the mixed format vLLM takes a wrong declaration without a word.
def test_a_form_that_roster_and_manifest_tell_otherwise_is_not_loaded(
    store: S3Store, publisher: Publisher, tmp_path: Path
) -> None:
    ada = put(store, tmp_path, "ada", is_3d=True)
    publisher.publish(replace(ada, is_3d=False))
    server = Server(store, tmp_path / "cache", limits=ServerLimits(8, mixed_format=True))
    with pytest.raises(refusals.NotIntact, match=r"is_3d_lora_weight False.*found is_3d_lora_weight True"):
        server.ask("ada")
    assert server.loads == 0 and adapters(server) == set()
    publisher.publish(ada)
    server.source.refresh()
    assert server.ask("ada") == ada.version


# https://github.com/vllm-project/vllm/issues/38520 and https://github.com/vllm-project/vllm/issues/2847: a server that
# was not started for an adapter. vLLM would answer that it "could not be loaded", and read it again for each request.
@pytest.mark.parametrize(
    ("needs", "limits", "says"),
    [
        (
            {"rank": 48, "max_lora_rank": 64},
            ServerLimits(32, mixed_format=True),
            "--max-lora-rank 64,.* with 32",
        ),
        (
            {"needs_mixed_format": True},
            ServerLimits(64, mixed_format=False),
            "--enable-mixed-moe-lora-format,.* without it",
        ),
        (
            {"format": "slots", "dtype": "BF16"},
            ServerLimits(64, mixed_format=True),
            "adapter_roster_slots .*without it",
        ),
        (
            {"format": "slots", "dtype": "BF16"},
            ServerLimits(64, mixed_format=True, slots_dtype="float32"),
            "--lora-dtype bfloat16,.* with float32",
        ),
    ],
)
def test_what_the_server_was_not_started_for_is_named(
    store: S3Store,
    publisher: Publisher,
    tmp_path: Path,
    needs: dict[str, object],
    limits: ServerLimits,
    says: str,
) -> None:
    ada = put(store, tmp_path, "ada")
    publisher.publish(ada)
    document = json.loads(store.get(ada.prefix + "manifest.json").body) | needs
    store.put(ada.prefix + "manifest.json", json.dumps(document).encode())
    server = Server(store, tmp_path / "cache", limits=limits)
    for name in ("ada", ada.version):
        with pytest.raises(refusals.ServerLacks, match=f"{ada.version}.*{says}.*vllm-args") as caught:
            server.ask(name)
    assert caught.value.status == 400 and server.loads == 0 and adapters(server) == set()
    fits = Server(
        store, tmp_path / "cache", limits=ServerLimits(64, mixed_format=True, slots_dtype="bfloat16")
    )
    assert fits.ask("ada") == ada.version


def test_a_slow_store_does_not_keep_the_roster_from_being_read(
    store: S3Store, publisher: Publisher, tmp_path: Path
) -> None:
    ada = put(store, tmp_path, "ada")
    publisher.publish(ada)
    asked, go_on = threading.Event(), threading.Event()

    def slowly(**wanted: Any) -> Any:
        if wanted["Key"].startswith("serving/"):
            asked.set()
            assert go_on.wait(30)
        return store._client.get_object(**wanted)

    server = Server(with_faults(store, get_object=slowly), tmp_path / "cache")

    async def use() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        waiting = asyncio.create_task(server.answer("ada"))
        try:
            while not asked.is_set():
                await asyncio.sleep(0.01)
            publisher.publish()
            await asyncio.wait_for(server.authors.refresh(), 10)
            with pytest.raises(refusals.NotServed):
                await server.answer("ada")
        finally:
            go_on.set()
        assert await waiting == ada.version, "who came before finishes"

    asyncio.run(use())


def test_a_version_that_scoring_loads_meanwhile_serves_no_author(
    store: S3Store, publisher: Publisher, tmp_path: Path
) -> None:
    """vLLM's lock is a version's, and scoring may have it first: its folder is removed afterwards."""
    ada = put(store, tmp_path, "ada")
    publisher.publish(ada)
    server = Server(store, tmp_path / "cache")
    scoring = [SimpleNamespace(lora_int_id=90, lora_path="/scratch")]

    class Serving:
        models = SimpleNamespace(
            is_base_model=lambda name: name == "tiny",
            _adapter_roster_serving=SimpleNamespace(
                as_answers=nullcontext, prepare=server.authors.prepare, authors=server.authors
            ),
        )

        async def _check_model(self, request: Any) -> None:
            if scoring:
                server.loaded[request.model] = scoring.pop()
            await server.load(request.model)

    resolver._wrap_check(Serving)
    request = Asked()
    request.model = "ada"  # type: ignore[attr-defined]
    asyncio.run(Serving()._check_model(request))
    assert request.model == ada.version  # type: ignore[attr-defined]
    assert server.authors.owns(ada.version) and not scoring


def test_without_the_store_cached_authors_are_served(
    store: S3Store, publisher: Publisher, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ada, bob = put(store, tmp_path, "ada", 1), put(store, tmp_path, "bob", 2)
    publisher.publish(ada, bob)
    Server(store, tmp_path / "cache").ask("ada")
    down = {call: failing(DOWN) for call in ("head_object", "get_object", "list_objects_v2")}
    server = Server(with_faults(store, **down), tmp_path / "cache")
    server.source.refresh()
    assert caplog.text.count("no new roster, the last is version 1") == 1
    assert server.ask("ada") == ada.version and server.ask(ada.version) == ada.version
    with pytest.raises(refusals.NotFetched, match=r"`bob@.* could not be fetched: .*http://store"):
        server.ask("bob")
    nothing = Server(with_faults(store, **down), tmp_path / "empty")
    with pytest.raises(refusals.NoRosterYet, match=r"`ada` .* no roster yet \(.*http://store"):
        nothing.ask("ada")


def test_a_roster_that_cannot_be_read_leaves_the_last_one(
    store: S3Store, publisher: Publisher, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ada = put(store, tmp_path, "ada")
    publisher.publish(ada)
    server = Server(store, tmp_path / "cache")
    store.put("roster/current.json", b'{"schema": 2}')
    server.source.refresh()
    assert server.ask("ada") == ada.version and "not one this release can read" in caplog.text
    store.delete("roster/current.json")
    server.source.refresh()
    assert server.ask("ada") == ada.version and "it is gone from the store" in caplog.text


def test_adapters_nobody_needs_leave_the_cache(
    store: S3Store, publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what was purged does not stay on the servers' disks."""
    monkeypatch.setattr(author_serving, "_LOOK_S", -1.0)
    ada, bob = put(store, tmp_path, "ada", 1), put(store, tmp_path, "bob", 2)
    publisher.publish(ada, bob)
    server = Server(store, tmp_path / "cache")

    async def use() -> None:
        await server.answer("ada")
        await server.answer("bob")
        publisher.publish(bob, elsewhere={"other": ada})
        await server.authors.refresh()
        for digest in (ada.digest, bob.digest):
            os.utime(server.folder / "locks" / digest, (1.0, 1.0))
        await server.authors.keep_up(server.load)
        assert adapters(server) == {ada.digest, bob.digest}, "another server of this cache may serve it"
        await server.answer("bob")
        await server.answer(ada.version)
        publisher.publish(bob)
        await server.authors.refresh()
        await server.authors.keep_up(server.load)
        assert adapters(server) == {ada.digest, bob.digest}
        for digest in (ada.digest, bob.digest):
            os.utime(server.folder / "locks" / digest, (1.0, 1.0))
        await server.authors.keep_up(server.load)
        assert adapters(server) == {bob.digest} and set(server.loaded) == {bob.version}

    asyncio.run(use())


def test_the_busiest_are_loaded_unasked(store: S3Store, publisher: Publisher, tmp_path: Path) -> None:
    served = [put(store, tmp_path, author, seed) for seed, author in enumerate(("ada", "bob", "cleo"), 1)]
    publisher.publish(*served)
    first = Server(store, tmp_path / "cache")
    for author, requests in (("ada", 2), ("bob", 5), ("cleo", 4)):
        for _ in range(requests):
            first.popularity.add(author)
    first.popularity.save()
    later = Server(store, tmp_path / "cache", warm=2)
    asyncio.run(later.authors.keep_up(later.load))
    assert set(later.loaded) == {served[1].version, served[2].version}
    store.delete(served[2].prefix + WEIGHTS)
    newer = put(store, tmp_path, "bob", 8)
    publisher.publish(newer)
    later.source.refresh()
    asyncio.run(later.authors.keep_up(later.load))
    assert newer.version in later.loaded, "a new version of a busy author is loaded before it is asked for"


def test_one_fetch_at_a_time_fills_a_folder(store: S3Store, publisher: Publisher, tmp_path: Path) -> None:
    ada = put(store, tmp_path, "ada")
    publisher.publish(ada)
    servers = [Server(store, tmp_path / "cache") for _ in range(2)]
    (tmp_path / "cache" / "adapters" / f"{ada.digest}.incoming").mkdir()
    (tmp_path / "cache" / "adapters" / f"{ada.digest}.incoming" / WEIGHTS).write_bytes(b"half")
    asking = [threading.Thread(target=server.ask, args=("ada",)) for server in servers]
    for each in asking:
        each.start()
    for each in asking:
        each.join()
    assert adapters(servers[0]) == {ada.digest}
    assert [set(server.loaded) for server in servers] == [{ada.version}] * 2


def test_what_serving_by_name_needs_is_asked_for_at_start(tmp_path: Path) -> None:
    whole = PluginSettings(
        cache_dir=tmp_path, engine_base="tiny", store_bucket="bucket", store_region="us-east-1"
    )
    resolver.check_settings(whole, runtime_updating=True, any_name=False, other_server=False)
    with pytest.raises(errors.ResolverSettingsError, match="unset VLLM_SKIP_MODEL_NAME_VALIDATION"):
        resolver.check_settings(whole, runtime_updating=True, any_name=True, other_server=False)
    with pytest.raises(errors.ResolverSettingsError, match="unset VLLM_USE_RUST_FRONTEND"):
        resolver.check_settings(whole, runtime_updating=True, any_name=False, other_server=True)
    with pytest.raises(errors.ResolverSettingsError) as caught:
        resolver.check_settings(
            PluginSettings(cache_dir=tmp_path), runtime_updating=False, any_name=False, other_server=False
        )
    for name in ("ENGINE_BASE", "STORE_BUCKET", "STORE_REGION", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        assert name in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert "serves no author" in str(errors.RosterUnattendedError("RuntimeError()"))
