"""`roster export` and `roster push`: what servers are told to serve the published roster."""

from __future__ import annotations

import json
import os
import pickle  # noqa: TID251 - errors cross process borders this way
import re
import shlex
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from cli_builders import Roster
from engine_builders import REPOSITORY, json_from_engine, running_engine
from feed_builders import PushedServer, publish, stage, staged_digest
from store_builders import memory_store

from roster.feeds import plan_arguments
from roster.serving import Roster as Document
from storage.errors import InvalidDocument
from storage.s3 import S3Store
from tasks.bpb.engine import Engine
from tasks.errors import NothingPublished, OtherServer, StillServed
from tasks.pushing import fetch_adapter

ANNA, ANNA_NEW, BERTA = "a" * 64, "b" * 64, "c" * 64


@pytest.fixture
def store() -> Iterator[S3Store]:
    with memory_store() as store:
        yield store


@pytest.fixture
def roster(
    tmp_path: Path, store: S3Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Roster:
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith("ROSTER_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ROSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("flows.connect.open_store", lambda settings: store)
    return Roster(capsys, tmp_path / "home")


# export


def test_the_roster_is_exported_as_it_is(roster: Roster, store: S3Store) -> None:
    publish(store, {"tiny": {"anna": ANNA}, "big": {"berta": BERTA}})
    assert roster("export").document == json.loads(store.get("roster/current.json").body)
    one = roster("export", "--base", "big").document
    assert list(one["bases"]) == ["big"] and one["version"] == 7


def test_modules_are_exported_as_vllm_takes_them(roster: Roster, store: S3Store) -> None:
    publish(store, {"tiny": {"berta-3d": BERTA, "anna": ANNA}})
    ran = roster("export", "--format", "lora-modules", "--path-root", "/mnt/serving")
    assert [json.loads(line) for line in ran.out.splitlines()] == [
        {
            "name": "anna",
            "path": f"/mnt/serving/anna/{ANNA}",
            "base_model_name": "model-tiny",
            "is_3d_lora_weight": False,
        },
        {
            "name": "berta-3d",
            "path": f"/mnt/serving/berta-3d/{BERTA}",
            "base_model_name": "model-tiny",
            "is_3d_lora_weight": True,
        },
    ]
    document = roster("export", "--format", "lora-modules", "--path-root", "/mnt/serving", "--json").document
    assert document["modules"] == [json.loads(line) for line in ran.out.splitlines()]


def test_all_arguments_of_a_server_are_exported(roster: Roster, store: S3Store) -> None:
    flags = ["enable_mixed_moe_lora_format"]
    publish(store, {"tiny": {"anna": ANNA, "berta-3d": BERTA}}, max_lora_rank=64, flags=flags)
    ran = roster("export", "--format", "vllm-args", "--path-root", "/mnt/a b")
    arguments = shlex.split(ran.out)
    assert arguments[:-2] == [
        *("--served-model-name", "model-tiny"),
        *("--enable-lora", "--max-lora-rank", "64", "--max-loras", "2", "--max-cpu-loras", "2"),
        *("--enable-mixed-moe-lora-format", "--lora-modules"),
    ]
    assert [json.loads(text)["path"] for text in arguments[-2:]] == [
        f"/mnt/a b/anna/{ANNA}",
        f"/mnt/a b/berta-3d/{BERTA}",
    ]
    assert ran.err == "in the server's environment: VLLM_ALLOW_RUNTIME_LORA_UPDATING=1\n"


def test_a_server_with_the_plugin_needs_no_modules(
    roster: Roster, store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, {"tiny": {"anna": ANNA}})
    monkeypatch.setenv("ROSTER_STORE_ENDPOINT", "http://store:8333")
    monkeypatch.setenv("ROSTER_STORE_SECRET_KEY", "hush")
    ran = roster("export", "--format", "vllm-args", "--json")
    document = ran.document
    assert "--lora-modules" not in document["arguments"]
    assert "--enable-mixed-moe-lora-format" not in document["arguments"]
    assert document["environment"]["ADAPTER_ROSTER_ENGINE_BASE"] == "tiny"
    assert document["environment"]["ADAPTER_ROSTER_STORE_ENDPOINT"] == "http://store:8333"
    assert document["environment"]["ADAPTER_ROSTER_STORE_BUCKET"] == "roster"
    assert "hush" not in ran.out + ran.err, "secrets are not printed"


# https://github.com/vllm-project/vllm/issues/2847: a rank above max_lora_rank is refused at load.
def test_slots_and_kept_adapters_follow_the_authors_and_what_is_asked(store: S3Store) -> None:
    publish(store, {"tiny": {f"author-{n:02}": f"{n:064x}" for n in range(40)}}, max_loras=4)
    base = Document.model_validate_json(store.get("roster/current.json").body).bases["tiny"]

    def slots(**asked: int) -> tuple[str, str]:
        arguments = plan_arguments(base, (), **asked)
        return tuple(arguments[arguments.index(name) + 1] for name in ("--max-loras", "--max-cpu-loras"))

    assert slots() == ("4", "16"), "vLLM's own default would keep four, and read the disk for every swap"
    assert slots(max_loras=24) == ("24", "24"), "vLLM refuses fewer kept adapters than slots"
    assert slots(max_cpu_loras=100) == ("4", "100")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--format", "vllm-args"], 2, "the roster has big, tiny: name it with --base"),
        (["--format", "lora-modules", "--base", "tiny"], 2, "give --path-root too"),
        (["--base", "tinny"], 2, "expected a registered base, found: big, idle, tiny"),
        (["--base", "idle"], 2, "base idle: expected adapters that the roster serves, found none"),
    ],
)
def test_an_export_that_says_too_little_is_refused(
    roster: Roster, store: S3Store, arguments: list[str], code: int, said: str
) -> None:
    publish(store, {"big": {"berta": BERTA}, "idle": {}, "tiny": {"anna": ANNA}})
    ran = roster("export", *arguments, "--json")
    assert (ran.code, said in ran.document["error"]) == (code, True), ran.document


@pytest.mark.parametrize("command", [["export"], ["push", "--server", "http://127.0.0.1:9"]])
def test_without_a_roster_there_is_nothing_to_feed(roster: Roster, command: list[str]) -> None:
    ran = roster(*command, "--json")
    assert ran.code == 3
    assert "roster/current.json: expected the roster in the store, found none" in ran.document["error"]
    assert "`roster sync` publishes" in ran.document["error"]


# push


def adapter(text: str) -> dict[str, bytes]:
    return {"adapter_config.json": b'{"r": 3}', "adapter_model.safetensors": text.encode() * 100}


def steps(document: dict[str, object]) -> list[tuple[str, str]]:
    return [(step["act"], step["author"]) for step in document["steps"]]  # type: ignore[attr-defined]


def test_a_server_is_brought_up_to_the_roster_and_stays_there(
    roster: Roster, store: S3Store, tmp_path: Path
) -> None:
    old, new = stage(store, "anna", adapter("old")), stage(store, "anna", adapter("new"))
    berta = stage(store, "berta-3d", adapter("berta"), is_3d=True)
    clara = stage(store, "clara", adapter("clara"))
    publish(store, {"tiny": {"anna": old, "clara": clara}})
    pushed = tmp_path / "home" / "pushed"
    with PushedServer("model-tiny") as server:
        push = ("push", "--server", server.url, "--json")
        first = roster(*push)
        assert (first.code, steps(first.document)) == (0, [("load", "anna"), ("load", "clara")])
        for name, content in adapter("old").items():
            assert (pushed / "anna" / old / name).read_bytes() == content
        server.loaded["anna@0123456789abcdef"] = "/tmp/candidate"  # what scoring has loaded is not ours

        publish(store, {"tiny": {"anna": new, "berta-3d": berta}})  # clara is held
        server.orders.clear()
        would = roster(*push, "--dry-run").document
        assert server.orders == [] and not (pushed / "berta-3d").exists()
        second = roster(*push)
        assert steps(second.document) == steps(would)
        assert server.orders == [
            ("unload", "clara", "", False),
            ("unload", "anna", "", False),
            ("load", "anna", str(pushed / "anna" / new), False),
            ("load", "berta-3d", str(pushed / "berta-3d" / berta), True),
        ], "a name is unloaded before new bytes come under it, and never loaded in place"
        assert server.loaded == {
            "anna": str(pushed / "anna" / new),
            "berta-3d": str(pushed / "berta-3d" / berta),
            "anna@0123456789abcdef": "/tmp/candidate",
        }
        assert (pushed / "clara" / clara).is_dir(), "running requests may read it yet"

        server.orders.clear()
        third = roster(*push)
        assert (third.code, server.orders) == (0, [])
        assert steps(third.document) == [("keep", "anna"), ("keep", "berta-3d")]
        ran = roster(*push[:-1])
        assert ran.err == "unload 0, load 0, replace 0, keep 2, leave 0, failed 0\n" and ran.out == ""


def test_nobody_of_the_base_in_the_roster_empties_the_server(roster: Roster, store: S3Store) -> None:
    publish(store, {"tiny": {}, "big": {"berta": BERTA}})
    with PushedServer("model-tiny") as server:
        server.loaded["anna"] = f"/served/anna/{ANNA}"
        ran = roster("push", "--server", server.url)
    assert (ran.code, ran.out, server.loaded) == (0, f"unloads anna {ANNA[:12]}\n", {})


def test_damaged_files_are_fetched_again_before_the_server_hears_of_them(
    roster: Roster, store: S3Store, tmp_path: Path
) -> None:
    digest = stage(store, "anna", adapter("anna"))
    publish(store, {"tiny": {"anna": digest}})
    folder = tmp_path / "data" / "anna" / digest
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(adapter("Anna")["adapter_model.safetensors"])
    with PushedServer("model-tiny") as server:
        ran = roster("push", "--server", server.url, "--directory", "data", "--json")
    assert ran.code == 0
    assert staged_digest({path.name: path.read_bytes() for path in folder.iterdir()}) == digest


def test_bytes_that_are_not_the_manifests_reach_no_server(
    roster: Roster, store: S3Store, tmp_path: Path
) -> None:
    digest = stage(store, "anna", adapter("anna"))
    store.put(f"serving/anna/{digest}/adapter_model.safetensors", b"other bytes")
    publish(store, {"tiny": {"anna": digest}})
    with PushedServer("model-tiny") as server:
        ran = roster("push", "--server", server.url, "--json")
    assert ran.code == 3 and "the manifest says" in ran.document["error"]
    assert server.orders == []
    assert not (tmp_path / "home" / "pushed" / "anna" / digest / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("name", ["../adapter_config.json", "/tmp/adapter_config.json", "..", ""])
def test_a_manifest_that_leads_out_of_its_folder_is_refused(
    store: S3Store, tmp_path: Path, name: str
) -> None:
    digest = stage(store, "anna", adapter("anna"))
    manifest = json.loads(store.get(f"serving/anna/{digest}/manifest.json").body)
    manifest["files"][0]["name"] = name
    store.put(f"serving/anna/{digest}/manifest.json", json.dumps(manifest).encode())
    with pytest.raises(InvalidDocument, match="is no plain file name"):
        fetch_adapter(store, "anna", digest, tmp_path / "data" / "anna")
    assert not (tmp_path / "data").exists()


def test_a_server_in_a_container_is_told_its_own_path(
    roster: Roster, store: S3Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    digest = stage(store, "anna", adapter("anna"))
    publish(store, {"tiny": {"anna": digest}})
    (tmp_path / "seen").symlink_to(tmp_path / "data")
    seen = PurePosixPath(tmp_path / "seen")
    with PushedServer("model-tiny") as server:
        roster("push", "--server", server.url, "--directory", "data", "--path-root", str(seen))
        assert server.loaded == {"anna": str(seen / "anna" / digest)}
        again = roster("push", "--server", server.url, "--directory", "data", "--json").document
        assert steps(again) == [("keep", "anna")], "the digest tells, whatever the folder is called"
        hidden = roster("push", "--server", server.url, "--path-root", "/nowhere", "--json")
        assert steps(hidden.document) == [("keep", "anna")]
    with PushedServer("model-tiny") as other:
        ran = roster("push", "--server", other.url, "--path-root", "/nowhere", "--json")
    assert ran.code == 3 and "readable by the server" in ran.document["error"]


def test_what_the_server_refuses_does_not_cost_the_author_the_old_one(roster: Roster, store: S3Store) -> None:
    old, new = stage(store, "anna", adapter("old")), stage(store, "anna", adapter("rank 64"))
    berta = stage(store, "berta", adapter("berta"))
    publish(store, {"tiny": {"anna": old}})

    class Small(PushedServer):
        full = False

        def _load(self, name: str, path: str) -> tuple[int, dict[str, object]]:
            if path.endswith(new) or self.full:
                return 400, {"error": {"message": "LoRA rank 64 is greater than max_lora_rank 16."}}
            return super()._load(name, path)

    with Small("model-tiny") as server:
        roster("push", "--server", server.url)
        path = server.loaded["anna"]
        publish(store, {"tiny": {"anna": new, "berta": berta}})
        ran = roster("push", "--server", server.url, "--json")
        assert ran.code == 1
        anna, other = ran.document["steps"]
        assert "rank 64" in anna["problem"] and "The one before serves anna still" in anna["problem"]
        assert other["problem"] is None
        assert server.loaded["anna"] == path and "berta" in server.loaded
        assert f"roster: {anna['problem']}" in ran.err
        server.full = True
        anna = roster("push", "--server", server.url, "--json").document["steps"][0]
        assert "nobody serves anna" in anna["problem"] and "anna" not in server.loaded


def test_a_version_that_left_the_store_does_not_cost_the_author_the_old_one(
    roster: Roster, store: S3Store
) -> None:
    old = stage(store, "anna", adapter("old"))
    publish(store, {"tiny": {"anna": old}})
    with PushedServer("model-tiny") as server:
        roster("push", "--server", server.url)
        store.put(f"serving/anna/{ANNA}/manifest.json", b"{}")
        berta = stage(store, "berta", adapter("berta"))
        for new, fault in (
            (ANNA_NEW, "expected an object in the store"),
            (ANNA, "not a document we can use"),
        ):
            publish(store, {"tiny": {"anna": new, "berta": berta}})
            ran = roster("push", "--server", server.url, "--json")
            assert ran.code == 1 and fault in ran.document["steps"][0]["problem"]
            assert server.loaded["anna"].endswith(old) and server.loaded["berta"].endswith(berta)


def test_a_name_that_somebody_else_loaded_is_left_alone(roster: Roster, store: S3Store) -> None:
    publish(store, {"tiny": {"anna": ANNA}})
    with PushedServer("model-tiny") as server:
        server.loaded["anna"] = "/home/someone/adapter"
        ran = roster("push", "--server", server.url, "--json")
    (step,) = ran.document["steps"]
    assert (ran.code, step["act"], server.orders) == (1, "leave", [])
    assert "/home/someone/adapter, which no push put there" in step["problem"]


def test_a_server_that_takes_no_orders_is_found_out(roster: Roster, store: S3Store) -> None:
    """vLLM answers 404 for a name that it does not know, and for routes that it does not have."""
    publish(store, {"tiny": {"berta": stage(store, "berta", adapter("berta"))}})
    with PushedServer("model-tiny", deaf=True) as server:
        ran = roster("push", "--server", server.url, "--json")
        assert ran.code == 3 and "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in ran.document["error"]
        server.loaded["anna"] = f"/served/anna/{ANNA}"
        ran = roster("push", "--server", server.url, "--json")
    assert ran.code == 3
    assert "expected it to forget anna, found them served still" in ran.document["error"]
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in ran.document["error"]


def test_a_server_with_the_plugin_is_left_to_itself(roster: Roster, store: S3Store) -> None:
    publish(store, {"tiny": {"anna": ANNA}})
    with PushedServer("model-tiny") as server:
        server.loaded["anna"] = f"anna@{ANNA[:16]}"
        ran = roster("push", "--server", server.url)
    assert (ran.code, server.orders) == (0, [])
    assert "has our plugin and follows the roster by itself" in ran.err


@pytest.mark.parametrize(
    ("models", "arguments", "said"),
    [
        (("model-other",), [], "expected it to serve model-big (base big), model-tiny (base tiny)"),
        (("model-big",), ["--base", "tiny"], "expected it to serve model-tiny (base tiny), found model-big"),
        (("model-big", "model-tiny"), [], "expected it to serve one base alone, found big and tiny"),
    ],
)
def test_the_base_is_told_by_the_name_of_the_servers_model(
    roster: Roster, store: S3Store, models: tuple[str, ...], arguments: list[str], said: str
) -> None:
    publish(store, {"big": {"berta": BERTA}, "tiny": {"anna": ANNA}})
    with PushedServer(*models) as server:
        ran = roster("push", "--server", server.url, *arguments, "--json")
    assert (ran.code, server.orders) == (2, [])
    assert said in ran.document["error"] and "--served-model-name" in ran.document["error"]


def test_every_command_of_the_documentation_runs(
    roster: Roster, store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (REPOSITORY / "docs" / "feeds.md").read_text("utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = re.findall(r"roster [^)\n]+", "".join(blocks))
    assert len(lines) == 3 and {line.split()[1] for line in lines} == {"export", "push"}
    publish(store, {"tiny": {"anna": stage(store, "anna", adapter("anna"))}})
    monkeypatch.setattr("tasks.bpb.engine.Engine.load", lambda *_, **__: None)
    monkeypatch.setattr("tasks.pushing.fetch_adapter", lambda *_: None)
    with PushedServer("model-tiny") as server:
        for line in lines:
            ran = roster.line(line.replace("http://127.0.0.1:8000", server.url))
            assert (ran.code, bool(ran.out)) == (0, True), (line, ran.err)


@pytest.mark.parametrize(
    "error",
    [
        NothingPublished("roster/current.json"),
        OtherServer("http://a", "model-tiny (base tiny)", "model-big"),
        StillServed("http://a", "anna, berta"),
    ],
)
def test_errors_pickle_with_their_facts(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and vars(copy) == vars(error)
    assert str(copy) == str(error) and "expected" in str(error) and "found" in str(error)


@pytest.mark.real
def test_pushed_versions_answer_as_the_merged_models_do(
    roster: Roster, store: S3Store, tmp_path: Path
) -> None:
    """The real vLLM with prefix caching on: two versions of one author, one after the other, under one name."""
    world = json_from_engine(REPOSITORY / "tests" / "engine_world.py", tmp_path)

    def put(author: str, name: str) -> str:
        folder = tmp_path / name
        return stage(store, author, {path.name: path.read_bytes() for path in folder.iterdir()})

    old, new, berta = put("anna", "experts-1"), put("anna", "experts-2"), put("berta", "experts-4")
    publish(store, {"tiny": {"anna": old}})
    prompts = world["prompts"]

    def differs(engine: Engine, model: str, reference: str) -> float:
        found = engine.logprobs(model, prompts)
        pairs = zip(found, world["references"][reference], strict=True)
        return max(abs(a - b) for row, wanted in pairs for a, b in zip(row[1:], wanted, strict=True))  # type: ignore[operator]

    folder = roster.home / "pushed"
    fetch_adapter(store, "anna", old, folder / "anna" / old)
    exported = roster("export", "--format", "vllm-args", "--path-root", folder).out
    more = (*shlex.split(exported), "--enable-prefix-caching")
    flags = {"max_loras": 1, "max_lora_rank": 8, "max_cpu_loras": 1}
    with (
        running_engine(tmp_path / "base", tmp_path, more=more, **flags) as running,
        Engine(running.url, timeout_s=60) as engine,
    ):
        push = ("push", "--server", running.url, "--json")
        assert steps(roster(*push).document) == [("keep", "anna")], "it was loaded at the start"
        assert differs(engine, "anna", "experts-1") < 1e-4 < differs(engine, "anna", "experts-2")
        publish(store, {"tiny": {"anna": new, "berta": berta}})
        ran = roster(*push)
        assert (ran.code, steps(ran.document)) == (0, [("replace", "anna"), ("load", "berta")])
        assert differs(engine, "anna", "experts-2") < 1e-4 and differs(engine, "berta", "experts-4") < 1e-4
        assert steps(roster(*push).document) == [("keep", "anna"), ("keep", "berta")]
        publish(store, {"tiny": {"berta": berta}})
        assert steps(roster(*push).document) == [("unload", "anna"), ("keep", "berta")]
        assert engine.served_models() == ("model-tiny", "berta")
