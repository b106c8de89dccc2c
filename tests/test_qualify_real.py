"""The gates on the real vLLM: three families in the form that each is served in, and an engine with a known fault."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_builders import running_engine
from family_builders import save_base
from family_models import VOCAB
from store_builders import memory_store
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from roster.serving_engine import EngineInfo
from storage.documents import put_document
from storage.keys import engine_key
from storage.qualifications import EngineCheck, Qualification, read_qualification
from storage.s3 import S3Store
from tasks.bpb.engine import Engine
from tasks.qualification import QualifyLimits, find_served_base, qualify_engine

pytestmark = pytest.mark.real

COMPANY = ("two_adapters", "slots_full", "evicted")
FLAGS = {"max_loras": 3, "max_lora_rank": 8, "max_cpu_loras": 6}

# What stock vLLM does on a CPU, put back into the wrapper that mends it: slot -1 of a base row indexes the table of
# slots from its end.
STOCK = """
def register():
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from roster.engine_plugin.cpu_punica import CpuPunicaWrapper
    CpuPunicaWrapper.add_shrink = PunicaWrapperCPU.add_shrink
    CpuPunicaWrapper.add_expand = PunicaWrapperCPU.add_expand
"""


@pytest.fixture
def store() -> Iterator[S3Store]:
    with memory_store() as store:
        yield store


def save_served(name: str, folder: Path) -> None:
    """A tiny model of a family, with a tokenizer that the server can start with."""
    save_base(name, folder)
    vocabulary = {f"t{number}": number for number in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="t1", eos_token="t2").save_pretrained(
        folder
    )


def qualify(store: S3Store, tmp_path: Path, name: str, *, mixed: bool) -> tuple[Qualification, EngineInfo]:
    """As the command does it: over HTTP, under the lease, by the base's config alone."""
    save_served(name, tmp_path / "base")
    with running_engine(tmp_path / "base", tmp_path, **FLAGS, mixed_moe_lora_format=mixed) as server:
        info = EngineInfo.model_validate_json(server.engine_json.read_bytes())
        put_document(store, engine_key("tiny"), info)
        base = find_served_base(
            store, "tiny", config=tmp_path / "base", engine_url=server.url, served_model="tiny"
        )
        limits = QualifyLimits(tmp_path / "work", 60, 120, 0)
        found = qualify_engine(store, base, limits, sample=3, say=print)
        with Engine(server.url, timeout_s=30) as engine:
            assert engine.served_models() == ("tiny",), "nothing stays loaded"
    for check in found.checks:
        print(check.passed, check.name, check.found)
    assert read_qualification(store, "tiny", info.engine_id) == found
    assert list((tmp_path / "work" / "runs").iterdir()) == []
    return found, info


def named(found: Qualification) -> dict[str, EngineCheck]:
    return {check.name: check for check in found.checks}


@pytest.mark.parametrize(
    ("name", "mixed", "forms"),
    [
        ("qwen3_moe", False, {""}),
        ("gpt_oss", False, {""}),
        ("mixtral", True, {"_per_expert", "_stacked"}),
    ],
)
def test_our_engine_passes(
    prefect_server: None, store: S3Store, tmp_path: Path, name: str, mixed: bool, forms: set[str]
) -> None:
    found, info = qualify(store, tmp_path, name, mixed=mixed)
    assert found.passed, found.failures
    assert info.stacked_experts is (mixed or name == "gpt_oss")
    checks = named(found)
    assert {f"applied_routed_experts{form}" for form in forms} | {"applied_attention"} <= set(checks)
    for check in checks.values():
        if check.name.startswith("applied_"):
            assert check.figures["effect"] > 0.1, check
    for gate in COMPANY:
        assert max(checks[gate].figures["adapters"], checks[gate].figures["base"]) < 3e-5, checks[gate]
    assert checks["loads"].figures == {"adapters": 7, "slots": 3}


def test_stock_vllm_on_a_cpu_does_not_pass(
    prefect_server: None, store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = tmp_path / "plugin"
    (plugin / "stock_punica-1.dist-info").mkdir(parents=True)
    (plugin / "stock_punica.py").write_text(STOCK)
    (plugin / "stock_punica-1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: stock-punica\nVersion: 1\n"
    )
    (plugin / "stock_punica-1.dist-info" / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nstock_punica = stock_punica:register\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(plugin))
    found, _ = qualify(store, tmp_path, "qwen3_moe", mixed=False)
    assert not found.passed
    checks = named(found)
    assert {check.name for check in found.failures} <= set(COMPANY)
    full = checks["slots_full"]
    assert not full.passed and full.figures["base"] > 0.1, "base rows got an adapter"
    assert full.figures["adapters"] < 1e-4, "and the adapters' rows were right"
