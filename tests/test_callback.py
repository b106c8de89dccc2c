"""The callback for transformers' Trainer: what it saves, submits and announces, and what it says when it cannot."""

from __future__ import annotations

import json
import logging
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import NAMESPACE_URL, uuid5

import pytest
import torch
from loopback_server import LoopbackServer
from peft import LoraConfig, get_peft_model
from producer_builders import LAYERS, SHAPES, build_model
from safetensors import SafetensorError
from safetensors.torch import load_file
from store_builders import failing, memory_store, with_faults
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import flows.callback
from flows.callback import SubmitAdapter
from flows.cli.app import run as run_roster
from flows.settings import SettingsIncomplete
from storage.errors import InvalidName, StoreUnavailable
from storage.s3 import S3Store
from storage.uploads import read_upload

UNSLOTH = ModuleType("unsloth_zoo")
WEIGHTS = "adapter_model.safetensors"
FIRST = SimpleNamespace(is_world_process_zero=True)
OTHER = SimpleNamespace(is_world_process_zero=False)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3Store]:
    """An empty bucket, and settings that name a store and no Prefect."""
    for name in ("PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING", "ROSTER_PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ROSTER_STORE_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("ROSTER_HOME", str(tmp_path / "home"))
    with memory_store() as store:
        monkeypatch.setattr(flows.callback, "open_store", lambda settings: store)
        monkeypatch.setattr("flows.connect.open_store", lambda settings: store)
        yield store


@dataclass
class Prefect:
    """Takes events by HTTP as Prefect does; says that it is busy as often as it is told to."""

    busy: int = 0
    status: int = 204
    url: str = ""
    seen: list[tuple[str, str | None, Any]] = field(default_factory=list)


@pytest.fixture
def prefect(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Prefect]:
    prefect = Prefect()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prefect.seen.append((self.path, self.headers.get("Authorization"), body))
            self.send_response(503 if len(prefect.seen) <= prefect.busy else prefect.status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with LoopbackServer(Handler) as server:
        prefect.url = server.url
        monkeypatch.setenv("ROSTER_PREFECT_API_URL", f"{server.url}/api")
        yield prefect


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(9) * 5 + index) % 47
        return {"input_ids": ids, "labels": ids}


def linear(*adapters: str) -> Any:
    """A model small enough to be saved in no time, with these adapters; only the first is active."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7))
    config = LoraConfig(r=3, target_modules=["0"], init_lora_weights=False)
    wrapped = get_peft_model(model, config, adapter_name=adapters[0])
    for name in adapters[1:]:
        wrapped.add_adapter(name, config)
    return wrapped


def end(callback: SubmitAdapter, model: Any, folder: Path, state: Any = FIRST) -> None:
    callback.on_train_end(SimpleNamespace(output_dir=str(folder)), state, Any, model=model)  # type: ignore[arg-type]


def keys(store: S3Store) -> list[str]:
    return [found.key for found in store.list_objects("uploads/")]


def by_hand(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The command that the last error names."""
    [record] = [one for one in caplog.records if one.levelno == logging.ERROR]
    command = shlex.split(record.getMessage().rpartition("by hand: ")[2])
    assert command[:2] == ["roster", "submit"]
    return command[1:]


@pytest.mark.real
def test_what_the_trainer_trained_is_saved_submitted_and_announced(
    store: S3Store, prefect: Prefect, tmp_path: Path
) -> None:
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=3, target_modules=["q_proj"], target_parameters=parameters)
    model = get_peft_model(build_model(SHAPES["small"]), config)
    arguments = TrainingArguments(
        str(tmp_path / "out"),
        max_steps=1,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Tokens())
    trainer.add_callback(SubmitAdapter(author="ash", base="tiny", run="run-1", heldout=("ash/main",)))
    trainer.train()

    upload = read_upload(store, "ash", "run-1")
    assert (upload.marker.base, upload.ambiguity) == ("tiny", None)
    assert upload.training is not None and upload.training.trainer is not None
    assert upload.training.heldout == ("ash/main",)
    assert (upload.training.trainer.name, upload.training.trainer.version) == (
        "peft",
        metadata.version("peft"),
    )
    folder = tmp_path / "out" / "adapter-run-1"
    assert store.get(f"uploads/ash/run-1/{WEIGHTS}").body == (folder / WEIGHTS).read_bytes()
    trained = {
        name: value for name, value in model.named_parameters() if ".experts." in name and "lora_B" in name
    }
    saved = load_file(folder / WEIGHTS)
    assert len(trained) == 2 * LAYERS
    for name, value in trained.items():
        assert value.abs().max() > 0 and torch.equal(saved[name.replace(".default", "")], value)

    [(path, authorization, [event])] = prefect.seen
    assert (path, authorization) == ("/api/events", None)
    assert event.pop("id") == str(uuid5(NAMESPACE_URL, f"ash/run-1/{upload.marker.submission}"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", event.pop("occurred"))
    assert event == {
        "event": "adapter.trained",
        "resource": {"prefect.resource.id": "adapter.ash.run-1"},
        "payload": {
            "author": "ash",
            "run": "run-1",
            "base": "tiny",
            "submission": upload.marker.submission,
            "adapter_digest": upload.adapter_digest,
        },
    }


def test_only_the_first_process_of_the_world_submits(store: S3Store, tmp_path: Path) -> None:
    callback = SubmitAdapter(author="ash", base="tiny")
    end(callback, linear("default"), tmp_path, OTHER)
    assert keys(store) == [] and list(tmp_path.iterdir()) == []
    end(callback, linear("default"), tmp_path)
    assert len(keys(store)) > 0


def test_a_store_that_fails_costs_no_adapter(
    store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Training ends as ever, and the command in the log submits what lies there."""
    gone = StoreUnavailable("put", "k", "http://127.0.0.1:9 answers nothing")
    broken = with_faults(store, put_object=failing(gone))
    monkeypatch.setattr(flows.callback, "open_store", lambda settings: broken)
    callback = SubmitAdapter(author="ash", base="tiny", run="run-1", heldout=("ash/main", "ash/more"))
    end(callback, linear("default"), tmp_path)
    assert keys(store) == []
    assert "ash/run-1 is saved, but not submitted: " in caplog.text and "answers nothing" in caplog.text
    command = by_hand(caplog)
    assert command[1] == str(tmp_path / "adapter-run-1")
    assert run_roster(command) == 0
    upload = read_upload(store, "ash", "run-1")
    assert upload.training is not None and upload.training.heldout == ("ash/main", "ash/more")


def test_an_event_that_is_not_taken_costs_nothing(
    store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for url in ("http://127.0.0.1:9/api", "nowhere at all"):
        monkeypatch.setenv("ROSTER_PREFECT_API_URL", url)
        end(SubmitAdapter(author="ash", base="tiny", run="run-1"), linear("default"), tmp_path)
        assert "the sweep finds it" in caplog.text
        assert "uploads/ash/run-1/_READY.json" in keys(store)
        caplog.clear()


def test_a_busy_server_is_asked_again_with_the_same_event(
    store: S3Store, prefect: Prefect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite answers 503 under a burst; the id keeps the repeats from counting."""
    monkeypatch.setattr("flows.events._PAUSE_S", 0.01)
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "ada:secret")
    prefect.busy = 2
    end(SubmitAdapter(author="ash", base="tiny", run="run-1"), linear("default"), tmp_path)
    assert len(prefect.seen) == 3
    assert len({json.dumps(body) for _, _, body in prefect.seen}) == 1
    assert {authorization for _, authorization, _ in prefect.seen} == {"Basic YWRhOnNlY3JldA=="}


def test_an_answer_that_is_not_prefects_does_not_count(
    store: S3Store, prefect: Prefect, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A proxy's login page comes with 200."""
    prefect.status = 200
    end(SubmitAdapter(author="ash", base="tiny"), linear("default"), tmp_path)
    assert len(prefect.seen) == 1 and "the sweep finds it" in caplog.text


def test_an_adapter_of_another_name_is_found_in_its_folder(store: S3Store, tmp_path: Path) -> None:
    model = linear("second", "first")
    end(SubmitAdapter(author="ash", base="tiny", run="run-1"), model, tmp_path)
    saved = load_file(tmp_path / "adapter-run-1" / "second" / WEIGHTS)
    other = load_file(tmp_path / "adapter-run-1" / "first" / WEIGHTS)
    assert any(not torch.equal(saved[name], other[name]) for name in saved)
    assert (
        store.get(f"uploads/ash/run-1/{WEIGHTS}").body
        == (tmp_path / "adapter-run-1" / "second" / WEIGHTS).read_bytes()
    )


def test_a_model_of_transformers_own_adapters(
    store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.21.2")  # it wants one to come
    model = build_model(SHAPES["small"])
    model.add_adapter(LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False))
    end(SubmitAdapter(author="ash", base="tiny", run="run-1"), model, tmp_path)
    assert {file.digest.name for file in read_upload(store, "ash", "run-1").adapter_files} == {
        "adapter_config.json",
        WEIGHTS,
    }


def plain() -> Any:
    return torch.nn.Linear(5, 7)


def two_active() -> Any:
    model = linear("one", "two")
    model.base_model.set_adapter(["one", "two"])
    return model


def in_parts() -> Any:
    """DeepSpeed's third stage leaves every process a part of each parameter, and marks them so."""
    model = linear("default")
    next(iter(model.parameters())).ds_id = 0
    return model


def in_shards() -> Any:
    model = linear("default")
    model.add_module("shard", type("FullyShardedDataParallel", (torch.nn.Identity,), {})())
    return model


def on_a_full_disk() -> Any:
    def save(folder: str) -> None:
        raise SafetensorError("No space left on device")

    model = linear("default")
    model.save_pretrained = save
    return model


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (plain, "the model has no PEFT adapter"),
        (two_active, "2 of its adapters are active (one, two)"),
        (in_parts, "the model is spread over several processes"),
        (in_shards, "the model is spread over several processes"),
        (on_a_full_disk, "No space left on device. Try trainer.save_model"),
    ],
)
def test_what_one_process_cannot_save_is_told(
    store: S3Store, tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[], Any], fact: str
) -> None:
    end(SubmitAdapter(author="ash", base="tiny", run="run-1"), make(), tmp_path)
    assert f"the adapter of ash/run-1 is not saved: {fact}" in caplog.text
    assert by_hand(caplog)[1] == str(tmp_path / "adapter-run-1")
    assert keys(store) == []


def test_an_unsloth_that_is_loaded_is_named_as_the_trainer(
    store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its older releases pack by expert, and nothing in the file says so."""
    monkeypatch.setitem(sys.modules, "unsloth_zoo", UNSLOTH)
    versions = {"unsloth_zoo": "2026.8.17"}
    monkeypatch.setattr(flows.callback.metadata, "version", versions.__getitem__)
    end(SubmitAdapter(author="ash", base="tiny", run="run-1"), linear("default"), tmp_path)
    stated = json.loads(store.get("uploads/ash/run-1/training.json").body)["trainer"]
    assert stated == {"name": "unsloth_zoo", "version": "2026.8.17"}


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"author": "Ash"}, "Ash"),
        ({"run": "run 1"}, "run 1"),
        ({"heldout": ("main",)}, "main"),
        ({"trainer": "unsloth 2026"}, "name==version"),
    ],
)
def test_what_cannot_be_submitted_is_said_before_training(
    store: S3Store, options: dict[str, Any], fact: str
) -> None:
    with pytest.raises(InvalidName, match=fact):
        SubmitAdapter(**({"author": "ash", "base": "tiny"} | options))


def test_a_store_that_is_not_named_is_said_before_training(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROSTER_STORE_ENDPOINT")
    with pytest.raises(SettingsIncomplete, match="ROSTER_STORE_ENDPOINT"):
        SubmitAdapter(author="ash", base="tiny")


@pytest.mark.real
def test_a_machine_that_only_trains_needs_no_pipeline() -> None:
    """None of these can be imported there; transformers is a stand-in here, because importing it takes seconds."""
    script = """
import sys, types
for name in ("prefect", "duckdb", "vllm", "torch", "cyclopts", "rich", "httpx"):
    sys.modules[name] = None
transformers = types.ModuleType("transformers")
for name in ("TrainerCallback", "TrainerControl", "TrainerState", "TrainingArguments"):
    setattr(transformers, name, type(name, (), {}))
sys.modules["transformers"] = transformers
import flows.callback
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
