"""Authors by name on a real vLLM: `model="ada"` is what the roster serves at that moment, and nothing else is.

One server of a tiny Qwen3-MoE follows a roster in a real object store. Its cache holds two of the three adapters, and
vLLM itself keeps two in memory, so that it reads adapters from the cache again and again: were one removed that it
still knows, the server would exit.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from engine_builders import RunningEngine, json_from_engine, running_engine
from family_builders import merged, prompts, save_adapter, save_base, token_logprobs
from family_models import VOCAB
from resolver_builders import Published, Publisher, publish_adapter
from slots_builders import save_slots
from store_builders import SeaweedFS, start_seaweedfs
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from roster.engine_plugin.settings import SERVING_LOG_LINE
from tasks.bpb.engine import Engine
from tasks.bpb.engine_errors import EngineProtocolError
from tasks.directories import KnownBase, convert_directory
from tasks.lora.base import read_base_config

pytestmark = pytest.mark.real

FAMILY = "qwen3_moe"
EXPERTS, WEIGHTS = "routed_experts", "adapter_model.safetensors"
FIRST, SECOND, THIRD = (EXPERTS, "attention"), (EXPERTS,), ("attention", EXPERTS, "router")
REFRESH_S = 0.3

build = lru_cache(maxsize=4)(merged)


@dataclass
class World:
    """The server, its store and its cache; what was published."""

    engine: RunningEngine
    seaweed: SeaweedFS
    publisher: Publisher
    cache: Path
    folders: dict[tuple[str, ...], Path]

    def publish(
        self, author: str, parts: tuple[str, ...], *, control: bool = False, base: str = "tiny"
    ) -> Published:
        """Put an adapter on these parts into the store, whose digest no other author's has."""
        whose = self.folders[parts].with_name(f"{author}-{self.folders[parts].name}")
        if not whose.exists():
            shutil.copytree(self.folders[parts], whose)
            config = json.loads((whose / "adapter_config.json").read_text()) | {"revision": author}
            (whose / "adapter_config.json").write_text(json.dumps(config))
        is_3d = parts == SECOND
        return publish_adapter(self.publisher.store, author, whose, base=base, is_3d=is_3d, control=control)

    def ask(self, model: str, **more: Any) -> httpx.Response:
        body = {"model": model, "prompt": prompts()[0], "max_tokens": 1, "temperature": 0, **more}
        return httpx.post(f"{self.engine.url}/v1/completions", json=body, timeout=60, trust_env=False)

    def answered_by(self, model: str) -> str:
        answer = self.ask(model)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["model"])

    def gap(self, model: str, parts: tuple[str, ...]) -> float:
        """The largest distance of the server's log-probabilities from those of a model with these parts merged.

        Asked once there is room for it: what was used less than two seconds ago does not leave the cache.
        """
        until(lambda: self.ask(model).status_code == 200)
        with Engine(self.engine.url, timeout_s=60) as engine:
            found = engine.logprobs(model, prompts())
        own = build(FAMILY, parts)
        return max(
            abs(ours - theirs)
            for prompt, row in zip(prompts(), found, strict=True)
            for ours, theirs in zip(row[1:], token_logprobs(own, prompt), strict=True)
            if ours is not None
        )

    def cached(self) -> set[str]:
        return {path.name for path in (self.cache / "adapters").iterdir()}

    def log(self) -> str:
        return self.engine.log.read_text()


def until(holds: Callable[[], bool], *, within_s: float = 15) -> float:
    """Wait for a condition; the seconds that it took."""
    started = time.monotonic()
    while not holds():
        assert time.monotonic() - started < within_s
        time.sleep(0.05)
    return time.monotonic() - started


def convert(folder: Path, parts: tuple[str, ...]) -> Path:
    made = folder / "+".join(parts)
    save_adapter(FAMILY, parts, folder / f"trained-{made.name}")
    base = KnownBase(read_base_config(folder / "base", label=FAMILY))
    form = "stacked" if parts == SECOND else "per-expert"
    convert_directory(
        folder / f"trained-{made.name}", made, base, packing="rank_major", format=form, progress=None
    )
    return made


def save_tokenizer(folder: Path) -> None:
    """A word for each token id."""
    words = {f"w{number}": number for number in range(VOCAB)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), bos_token="w1", eos_token="w2"
    ).save_pretrained(folder)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("resolver")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    save_base(FAMILY, folder / "base")
    save_tokenizer(folder / "base")
    folders = {parts: convert(folder, parts) for parts in (FIRST, SECOND, THIRD)}
    sizes = [sum(file.stat().st_size for file in path.iterdir()) for path in folders.values()]
    (folder / "store").mkdir()
    with start_seaweedfs(folder / "store") as seaweed, pytest.MonkeyPatch.context() as patch:
        publisher = Publisher(seaweed.open("roster"))
        settings = {
            "CACHE_DIR": folder / "cache",
            "CACHE_BYTES": sum(sizes),  # any two, with their manifests
            "REFRESH_S": REFRESH_S,
            "ENGINE_BASE": "tiny",
            "STORE_ENDPOINT": seaweed.endpoint,
            "STORE_BUCKET": "roster",
            "STORE_REGION": "us-east-1",
            "STORE_ACCESS_KEY": seaweed.access_key,
            "STORE_SECRET_KEY": seaweed.secret_key,
        }
        for name, value in settings.items():
            patch.setenv(f"ADAPTER_ROSTER_{name}", str(value))
        with running_engine(
            folder / "base",
            folder,
            more=("--enable-mixed-moe-lora-format",),
            max_model_len=500,
            max_loras=2,
            max_lora_rank=8,
            max_cpu_loras=2,
        ) as engine:
            yield World(engine, seaweed, publisher, folder / "cache", folders)
    torch.set_num_threads(threads)


LOUD = """
import json, multiprocessing, os, vllm
from roster.engine_plugin import resolver
from roster.engine_plugin.errors import PluginError
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.serving import BaseServing

def attempt():
    try:
        resolver.register()
    except PluginError as error:
        return f"{type(error).__name__}: {error}"
    return "taken hold" if hasattr(OpenAIServingModels.__init__, resolver._WRAPPED) else "nothing"

def moved(owner, name, other):
    kept = getattr(owner, name)
    setattr(owner, name, other)
    found = attempt()
    setattr(owner, name, kept)
    return found

async def check_model(self, request, raw_request): ...
os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "0"
settings = attempt()
os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
said = {
    "settings": settings,
    "moved": moved(BaseServing, "_check_model", check_model),
    "release": moved(vllm, "__version__", "0.33.0"),
    "child": moved(multiprocessing, "parent_process", lambda: 1),
    "right": attempt(),
    "again": attempt(),
}
print(json.dumps(said))
"""


def test_what_does_not_fit_this_vllm_stops_it(tmp_path: Path) -> None:
    settings = {
        "ADAPTER_ROSTER_CACHE_DIR": str(tmp_path),
        "ADAPTER_ROSTER_ENGINE_BASE": "tiny",
        "ADAPTER_ROSTER_STORE_BUCKET": "roster",
        "ADAPTER_ROSTER_STORE_REGION": "us-east-1",
    }
    # Its own entry point would take hold before the script does.
    plugins = {"VLLM_PLUGINS": "adapter_roster_cpu_moe"}
    said = json_from_engine("-c", LOUD, env=settings | plugins)
    assert said["moved"].startswith("MovedInternalError: ") and "BaseServing._check_model" in said["moved"]
    assert "self, request, raw_request" in said["moved"] and "the resolver" in said["moved"]
    assert said["release"].startswith("UnpinnedVllmError: ") and "found 0.33.0" in said["release"]
    assert (said["child"], said["right"], said["again"]) == ("nothing", "taken hold", "taken hold")
    assert said["settings"].startswith("ResolverSettingsError: ") and "LORA_UPDATING=1" in said["settings"]


def test_an_author_is_served_seconds_after_ready_as_the_merged_model(world: World) -> None:
    assert SERVING_LOG_LINE in world.log()
    assert world.ask("ada").status_code == 404
    ada = world.publish("ada", FIRST)
    world.publisher.publish(ada)
    took = until(lambda: world.ask("ada").status_code == 200)
    assert took < 5, took
    assert world.answered_by("ada") == ada.version
    assert world.gap("ada", FIRST) < 1e-4 < 0.1 < world.gap("ada", ())
    assert world.gap("tiny", ()) < 1e-4
    cards = httpx.get(f"{world.engine.url}/v1/models", trust_env=False).json()["data"]
    assert {(card["id"], card["parent"]) for card in cards} == {
        ("tiny", None),
        ("ada", "tiny"),
        (ada.version, "tiny"),
    }


def test_a_new_version_is_for_new_requests_and_the_old_one_finishes(world: World) -> None:
    """The new one is stacked: it is only read right where the server is told that it is."""
    old, new = world.publish("bob", FIRST), world.publish("bob", SECOND)
    world.publisher.publish(old)
    time.sleep(2.5)  # so that there is room at once: what was used a moment ago stays
    until(lambda: world.ask("bob").status_code == 200)
    chunks: list[dict[str, Any]] = []
    reader = threading.Thread(target=_stream, args=(world, "bob", chunks))
    reader.start()
    until(lambda: len(chunks) > 3)
    world.publisher.publish(new)
    until(lambda: world.answered_by("bob") == new.version)
    assert reader.is_alive(), "the old version's request is still being answered"
    assert world.gap("bob", SECOND) < 1e-4 < 0.1 < world.gap("bob", FIRST)
    reader.join(60)
    assert {chunk["model"] for chunk in chunks} == {old.version}
    ids = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert len(ids) == 400
    said = [value for chunk in chunks for value in chunk["choices"][0]["logprobs"]["token_logprobs"]]
    prompt = prompts()[0]
    expected = token_logprobs(build(FAMILY, FIRST), [*prompt, *ids])[len(prompt) - 1 :]
    assert max(abs(ours - theirs) for ours, theirs in zip(said, expected, strict=True)) < 1e-3


def _stream(world: World, model: str, chunks: list[dict[str, Any]]) -> None:
    body = {
        "model": model,
        "prompt": prompts()[0],
        "max_tokens": 400,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 0,
        "return_token_ids": True,
    }
    url = f"{world.engine.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=120, trust_env=False) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunks.append(json.loads(line.removeprefix("data: ")))


def test_held_unknown_and_other_bases_authors_are_refused(world: World) -> None:
    ada = world.publish("ada", FIRST)
    world.publisher.publish(ada)
    until(lambda: world.ask("ada").status_code == 200)
    world.publisher.publish(elsewhere={"other": ada})
    until(lambda: world.ask("ada").status_code == 404)
    said = world.ask("ada").json()["error"]["message"]
    assert "`ada` is not served on tiny" in said and "but on other" in said and "roster why ada" in said
    for name in ("nobody", "ada@0123456789abcdef", "Tiny", "../ada"):
        answer = world.ask(name)
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "NotFoundError"), answer.text
    chat = {"model": "ada", "messages": [{"role": "user", "content": "w5"}]}
    for route, body in (("chat/completions", chat), ("responses", {"model": "ada", "input": "w5"})):
        answer = httpx.post(f"{world.engine.url}/v1/{route}", json=body, timeout=60, trust_env=False)
        assert answer.status_code == 404, (route, answer.text)


def test_an_author_in_slots_is_served_by_name(world: World) -> None:
    """The same adapter as FIRST, whose experts lie as vLLM's slots hold them."""
    folder = save_slots(world.folders[FIRST], world.folders[FIRST].with_name("fay-slots"))
    fay = publish_adapter(world.publisher.store, "fay", folder, changes={"format": "slots", "dtype": "F32"})
    world.publisher.publish(fay)
    until(lambda: world.ask("fay").status_code == 200)
    assert world.answered_by("fay") == fay.version
    assert world.gap("fay", FIRST) < 1e-4 < 0.1 < world.gap("fay", ())


def test_candidates_are_served_by_version(world: World) -> None:
    world.publisher.publish()
    cleo, control = world.publish("cleo", SECOND), world.publish("cleo", FIRST, control=True)
    name = f"cleo~control@{control.digest[:16]}"
    assert world.gap(cleo.version, SECOND) < 1e-4
    assert world.gap(name, FIRST) < 1e-4
    assert world.ask("cleo").status_code == 404
    with Engine(world.engine.url, timeout_s=60) as engine:
        away = world.publish("cleo", THIRD)
        engine.load(away.version, "/on/another/machine", is_3d=False)
        assert world.gap(away.version, THIRD) < 1e-4, (
            "fetched, where scoring has no disk in common with the engine"
        )
        with pytest.raises(EngineProtocolError, match="resolver plugin"):
            engine.load("cleo@0123456789abcdef", "/on/another/machine", is_3d=False)
    foreign = world.publish("dora", THIRD, base="other")
    refused = world.ask(foreign.version)
    assert refused.status_code == 404 and "an adapter of other" in refused.text, refused.text


def test_concurrent_first_requests_load_once_and_the_cache_stays_within_its_bound(world: World) -> None:
    """Three adapters by turns in a cache for two: each has to leave for another, and none while vLLM knows it."""
    parts = {"eve": FIRST, "fay": SECOND, "gil": THIRD}
    served = {author: world.publish(author, of) for author, of in parts.items()}
    world.publisher.publish(*served.values())
    until(lambda: world.ask("eve").status_code == 200)
    answers: list[httpx.Response] = []
    asking = [threading.Thread(target=lambda: answers.append(world.ask("fay"))) for _ in range(6)]
    for each in asking:
        each.start()
    for each in asking:
        each.join()
    assert [answer.status_code for answer in answers] == [200] * 6, answers[0].text
    assert world.log().count(f"adapter-roster: fetched {served['fay'].version}") == 1
    for _ in range(2):
        for author, of in parts.items():
            assert world.gap(author, of) < 1e-4, author
            assert len(world.cached()) <= 2
    assert world.ask("tiny").status_code == 200


def test_scoring_and_serving_do_not_disturb_one_another(world: World, tmp_path: Path) -> None:
    """Scoring loads the same names from folders that it removes afterwards, and unloads whatever has an "@"."""
    hal = world.publish("hal", FIRST)
    scratch = tmp_path / "scratch"
    shutil.copytree(hal.folder, scratch)
    with Engine(world.engine.url, timeout_s=60) as engine:
        engine.load(hal.version, str(scratch), is_3d=False)
        world.publisher.publish(hal)
        until(lambda: world.ask("hal").status_code == 200)
        engine.unload(hal.version)
        shutil.rmtree(scratch)
        assert world.gap("hal", FIRST) < 1e-4
        engine.load(hal.version, "/not/looked/at", is_3d=False)
        assert world.gap(hal.version, FIRST) < 1e-4
        engine.unload(hal.version)
        assert hal.version in engine.served_models()
    assert world.gap("hal", FIRST) < 1e-4


def test_a_corrupted_file_is_fetched_again(world: World) -> None:
    """The one of an adapter that vLLM knows, and the one that a server finds in its cache."""
    ida = world.publish("ida", FIRST)
    world.publisher.publish(ida)
    until(lambda: world.ask("ida").status_code == 200)
    weights = world.cache / "adapters" / ida.digest / WEIGHTS
    right = corrupt(weights)
    assert world.gap("ida", FIRST) < 1e-4
    assert weights.read_bytes() == right
    assert f"files of {ida.version} were fetched again" in world.log()

    jon = world.publish("jon", THIRD)
    found = world.cache / "adapters" / jon.digest
    assert not found.exists()
    found.mkdir()
    for name in ("adapter_config.json", WEIGHTS, "manifest.json"):
        (found / name).write_bytes(world.publisher.store.get(jon.prefix + name).body)
    right = corrupt(found / WEIGHTS)
    assert world.gap(jon.version, THIRD) < 1e-4
    assert (found / WEIGHTS).read_bytes() == right


def corrupt(path: Path) -> bytes:
    """Change one byte in the middle, and leave the size; the bytes that were there."""
    right = path.read_bytes()
    wrong = bytearray(right)
    wrong[len(wrong) // 2] ^= 255
    path.write_bytes(wrong)
    return right


def test_what_the_store_has_damaged_is_not_served(world: World) -> None:
    jan = world.publish("jan", THIRD)
    world.publisher.store.put(jan.prefix + WEIGHTS, b"other bytes")
    world.publisher.publish(jan)
    until(lambda: "damaged in the store" in world.ask("jan").text)
    answer = world.ask("jan")
    assert answer.status_code == 502 and WEIGHTS in answer.text


def test_without_the_store_cached_authors_are_served(world: World) -> None:
    """Last: the store stays down."""
    kim, lou = world.publish("kim", FIRST), world.publish("lou", SECOND)
    world.publisher.publish(kim, lou)
    until(lambda: world.ask("kim").status_code == 200)
    world.seaweed.process.terminate()
    world.seaweed.process.wait(30)
    until(lambda: "no new roster" in world.log(), within_s=60)
    started = time.monotonic()
    assert world.gap("kim", FIRST) < 1e-4
    assert time.monotonic() - started < 5, "no request for it waits for the store"
    assert world.ask("lou").status_code == 503, "it was not fetched while the store was up"
    assert world.ask("nobody").status_code == 404
