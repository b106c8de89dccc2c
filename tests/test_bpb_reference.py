"""The reference scorer: transformers and PEFT under the rules of the measurement, on the trainer's side."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from reference_builders import (
    CONTEXT,
    EXPERTS,
    RANK,
    bits_from,
    one_thread,
    read_model,
    regroup,
    save_adapter,
    save_base,
    state,
)
from safetensors.torch import load_file, save_file

from storage.bases import weights_digest
from storage.errors import InvalidDocument
from storage.heldout import register_heldout
from storage.s3 import S3Store
from storage.training import Reference
from tasks.bpb import reference_model
from tasks.bpb.heldout import HeldoutUnits, Unit, UnitKind
from tasks.bpb.identity import measure_id
from tasks.bpb.measure import prepare_units, score_subject
from tasks.bpb.protocol import BosRule
from tasks.bpb.reference import main
from tasks.bpb.reference_errors import (
    AdapterNotRead,
    HeldoutFileInvalid,
    LibraryMissing,
    ModelUnusable,
    PackingUnstated,
    ReferenceScoringError,
)
from tasks.bpb.reference_files import ExpertPacking, digest_weights, read_heldout_file, read_stated_packing
from tasks.bpb.reference_model import ReferenceModel

pytestmark = pytest.mark.real  # no server is real here, but models are
RANK_MAJOR, GROUPED = ExpertPacking.RANK_MAJOR, ExpertPacking.GROUPED_BY_EXPERT
PROSE = "Höre, mein Herz: 30 €, 雪 und ein 🦊."


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base with and one without a BOS token, and one adapter in both packings."""
    folder = tmp_path_factory.mktemp("world")
    save_base(folder / "base", bos=False)
    save_base(folder / "base-bos", bos=True)
    save_adapter(folder / "base", folder / "rank-major")
    save_adapter(folder / "base", folder / "grouped")
    regroup(folder / "grouped")
    return folder


def copy_adapter(source: Path, folder: Path) -> Path:
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def silent(label: str, done: int, total: int) -> None:
    pass


def score(model: ReferenceModel, name: str, units: list[Unit]) -> list[float]:
    return list(score_subject(model, name, prepare_units(model, units), label=name, progress=silent).bits)


def bytes_as_ids(model: ReferenceModel, text: str) -> list[int]:
    """The tokenizer is byte-level: one token for each byte, which the test looks up one by one."""
    return [model.tokenize(chr(byte), add_special_tokens=False)[0] for byte in text.encode("ascii")]


def relative(found: float, expected: float) -> float:
    return abs(found - expected) / abs(expected)


@pytest.mark.parametrize("bos", [False, True])
def test_base_and_adapter_score_as_a_plain_loop_over_transformers_and_peft(world: Path, bos: bool) -> None:
    base = world / ("base-bos" if bos else "base")
    model = ReferenceModel(base, packing=RANK_MAJOR)
    units = [Unit("text", "A plain text."), Unit("after", "the answer", "Question: ")]
    before = score(model, "base", units)
    model.load("own", str(world / "rank-major"), is_3d=False)
    own = score(model, "own", units)
    assert model.served_models() == ("base", "own")
    model.unload("own")
    assert score(model, "base", units) == before, "the base is the base again, to the last bit"

    start = [model.tokenize("x", add_special_tokens=True)[0]] if bos else []
    text = [*start, *bytes_as_ids(model, "A plain text.")]
    after = [*start, *bytes_as_ids(model, "Question: "), *bytes_as_ids(model, "the answer")]
    for found, adapter in ((before, None), (own, world / "rank-major")):
        reference = read_model(base, adapter)
        expected = [bits_from(reference, text, 1), bits_from(reference, after, len(after) - 10)]
        assert max(map(relative, found, expected)) < 1e-6
    assert max(map(relative, own, before)) > 0.01, "the adapter does something"


def test_bits_by_hand(world: Path) -> None:
    """Two tokens: the second one's share of the softmax, worked out with math alone."""
    model = ReferenceModel(world / "base")
    ids = model.tokenize("ab", add_special_tokens=False)
    with torch.no_grad():
        row = read_model(world / "base", None)(input_ids=torch.tensor([ids])).logits[0, 0].tolist()
    share = math.exp(row[ids[1]]) / math.fsum(math.exp(value) for value in row)
    assert score(model, "base", [Unit("u", "ab")])[0] == pytest.approx(-math.log2(share), rel=1e-6)


@pytest.mark.parametrize("length", [11, 12, 13, 30])
def test_windows_of_a_long_text(world: Path, length: int) -> None:
    """Window 12, stride 5: a text of one token less than fits, as many, one more, and of several windows."""
    model = ReferenceModel(world / "base", max_model_len=13)
    text = "".join(chr(97 + (7 * n * n + 3 * n) % 26) for n in range(length))
    prepared = prepare_units(model, [Unit("u", text)], stride=5)
    found = score_subject(model, "base", prepared, label="base", progress=silent).bits[0]
    ids, reference = bytes_as_ids(model, text), read_model(world / "base", None)
    expected, covered = 0.0, 1
    for begin in range(0, length, 5):
        end = min(begin + 12, length)
        if end > covered:
            expected += bits_from(reference, ids[begin:end], covered - begin)
            covered = end
    assert covered == length and found == pytest.approx(expected, rel=1e-6)
    if length > 12:
        assert relative(found, bits_from(reference, ids, 1)) > 1e-4, "what stands before a token matters"


@pytest.mark.parametrize("bos", [False, True])
def test_texts_of_many_alphabets_and_texts_that_begin_with_bos(world: Path, bos: bool) -> None:
    model = ReferenceModel(world / ("base-bos" if bos else "base"))
    units = [Unit("prose", PROSE), Unit("bos", "<s>again"), Unit("empty", "")]
    prepared = prepare_units(model, units)
    assert [unit.id for unit in prepared.units] == ["prose", "bos"]
    assert [(one.id, one.reason) for one in prepared.voided] == [("empty", "has no text")]
    sizes = [unit.byte_count for unit in prepared.units]
    if bos:
        assert sizes == [len(PROSE.encode()), len(b"<s>again")]
        assert [len(unit.ids) for unit in prepared.units] == [1 + len(PROSE.encode()), 1 + 1 + len("again")]
    else:  # the first token is left out with its bytes: an H, and the BOS that is text here
        assert sizes == [len(PROSE.encode()) - 1, len(b"again")]
        assert [len(unit.ids) for unit in prepared.units] == [len(PROSE.encode()), 1 + len("again")]
    reference = read_model(world / ("base-bos" if bos else "base"), None)
    for unit, found in zip(
        prepared.units,
        score_subject(model, "base", prepared, label="base", progress=silent).bits,
        strict=True,
    ):
        assert found == pytest.approx(bits_from(reference, list(unit.ids), 1), rel=1e-6)


@pytest.mark.parametrize("positions", [3, 1_000])
def test_logits_some_positions_at_a_time(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, positions: int
) -> None:
    """In a model that divides its logits, too: a head computed beside the model's own would miss that."""
    from transformers import AutoTokenizer, GraniteMoeConfig, GraniteMoeForCausalLM

    sizes = {"hidden_size": 40, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(5)
    config = GraniteMoeConfig(
        vocab_size=258,
        num_hidden_layers=2,
        num_local_experts=4,
        logits_scaling=0.25,
        initializer_range=0.3,
        **sizes,
    )
    GraniteMoeForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(world / "base").save_pretrained(tmp_path)
    monkeypatch.setattr(reference_model, "_POSITIONS", positions)
    model = ReferenceModel(tmp_path)
    ids = model.tokenize("A text of some length.", add_special_tokens=False)
    values = model.logprobs("base", [ids])[0]
    with torch.no_grad():
        logits = read_model(tmp_path, None)(input_ids=torch.tensor([ids])).logits[0]
    expected = [float(logits[n - 1].double().log_softmax(0)[ids[n]]) for n in range(1, len(ids))]
    assert values[0] is None and values[1:] == pytest.approx(expected, abs=1e-5)
    assert min(expected) < -6, "scaled: the logits are far apart"


def test_the_layers_below_run_once_for_each_window(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_model, "_POSITIONS", 4)
    model = ReferenceModel(world / "base")
    model.logprobs("base", [[1, 2, 3]])
    assert model._model is not None
    runs: list[int] = []
    model._model.base_model.layers[0].register_forward_hook(lambda *_: runs.append(1))
    prompts = [[7, 8, 9, 10, 11, 12, 13, 14, 15], [20, 21]]
    assert [len(values) for values in model.logprobs("base", prompts)] == [9, 2]
    assert len(runs) == 2


def test_a_grouped_file_is_read_as_it_was_trained(world: Path) -> None:
    """What the option, the marker and training.json say give the scores of the same adapter in rank_major."""
    units = [Unit("u", "A text to score, of some length.")]
    scores = {}
    for name, packing in (
        ("rank-major", RANK_MAJOR),
        ("rank-major", GROUPED),
        ("grouped", GROUPED),
        ("grouped", RANK_MAJOR),
    ):
        model = ReferenceModel(world / "base", packing=packing)
        model.load("own", str(world / name), is_3d=False)
        scores[name, packing] = score(model, "own", units)[0]
    assert scores["grouped", GROUPED] == scores["rank-major", RANK_MAJOR]
    assert relative(scores["grouped", RANK_MAJOR], scores["grouped", GROUPED]) > 1e-3, "the reading matters"
    assert relative(scores["rank-major", GROUPED], scores["grouped", GROUPED]) > 1e-3


NESTED = {"parameters": {"gate_up_proj": {"lora_B_layout": "grouped_by_expert"}}, "lora_B_layout": "mixed"}


@pytest.mark.parametrize(
    ("config", "training", "gate_up", "down"),
    [
        ({}, None, None, None),
        ({"lora_B_layout": "grouped_by_expert"}, None, GROUPED, GROUPED),
        ({"auto_mapping": {"lora_B_layout": "rank_major"}}, None, RANK_MAJOR, RANK_MAJOR),
        ({"unsloth_fused_expert_lora": NESTED}, None, GROUPED, None),
        ({"unsloth_fused_expert_lora": NESTED, "lora_B_layout": "rank_major"}, None, GROUPED, RANK_MAJOR),
        ({}, "grouped_by_expert", GROUPED, GROUPED),
        ({}, {"down_proj": "rank_major"}, None, RANK_MAJOR),
        ({"lora_B_layout": "rank_major"}, "grouped_by_expert", RANK_MAJOR, RANK_MAJOR),
    ],
)
def test_what_an_adapter_states(
    tmp_path: Path, config: dict[str, Any], training: object, gate_up: object, down: object
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 3} | config))
    if training is not None:
        (tmp_path / "training.json").write_text(json.dumps({"lora_B_layout": training}))
    stated = read_stated_packing(tmp_path)
    assert (stated.of("gate_up_proj"), stated.of("down_proj")) == (gate_up, down)


def test_a_stated_packing_is_followed(world: Path, tmp_path: Path) -> None:
    adapter = copy_adapter(world / "grouped", tmp_path / "stated")
    state(adapter, lora_B_layout="grouped_by_expert")
    asked, stating = ReferenceModel(world / "base", packing=GROUPED), ReferenceModel(world / "base")
    units = [Unit("u", "A text to score, of some length.")]
    asked.load("own", str(world / "grouped"), is_3d=False)
    stating.load("own", str(adapter), is_3d=False)
    assert score(asked, "own", units) == score(stating, "own", units)


def test_without_a_statement_nothing_is_scored(world: Path) -> None:
    """unsloth#6930: PEFT reads grouped factors without a word, and the scores are about the base's."""
    model = ReferenceModel(world / "base")
    with pytest.raises(PackingUnstated) as caught:
        model.load("own", str(world / "grouped"), is_3d=False)
    said = str(caught.value)
    assert str(world / "grouped") in said and "lora_B of " in said and "found neither" in said
    assert "--packing grouped_by_expert" in said and "--packing rank_major" in said
    assert model.served_models() == ("base",)
    assert_untouched(model, world)


def assert_untouched(model: ReferenceModel, world: Path) -> None:
    assert not any("lora_" in name for name, _ in model._base().named_parameters())
    ids = [5, 6, 7, 8]
    assert model.logprobs("base", [ids]) == ReferenceModel(world / "base").logprobs("base", [ids])


@pytest.mark.parametrize("settings", [{"r": 1}, {"target_parameters": None}])
def test_where_both_packings_agree_none_has_to_be_stated(
    world: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    save_adapter(world / "base", tmp_path / "own", **settings)
    model = ReferenceModel(world / "base")
    model.load("own", str(tmp_path / "own"), is_3d=False)
    reference = read_model(world / "base", tmp_path / "own")
    ids = [9, 30, 77, 120, 200]
    found = score_of(model.logprobs("own", [ids])[0])
    assert found == pytest.approx(bits_from(reference, ids, 1), rel=1e-6)
    assert relative(found, score_of(model.logprobs("base", [ids])[0])) > 1e-3


def score_of(values: tuple[float | None, ...]) -> float:
    return -math.fsum(value for value in values if value is not None) / math.log(2)


def test_layers_that_differ_have_no_reading_by_peft(tmp_path: Path) -> None:
    detail = {"parameters": {"down_proj": {"lora_B_layout": "mixed"}}}
    (tmp_path / "adapter_config.json").write_text(json.dumps({"unsloth_fused_expert_lora": detail}))
    with pytest.raises(
        PackingUnstated, match=r"down_proj: expected one packing, found layers that differ\. Bring"
    ):
        read_stated_packing(tmp_path)


def rename(old: str, new: str) -> Any:
    return lambda tensors: {name.replace(old, new): value for name, value in tensors.items()}


def without_down(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in tensors.items() if ".1.mlp.experts.lora_" not in name}


def exchanged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The orientation of PEFT up to 0.18.1: the factors of the transposed delta."""
    made = dict(tensors)
    for name, a in tensors.items():
        if ".experts." in name and ".lora_A." in name:
            other = name.replace(".lora_A.", ".lora_B.")
            b = tensors[other]
            made[name] = (
                b.reshape(b.shape[0], RANK, EXPERTS).permute(2, 1, 0).reshape(-1, b.shape[0]).contiguous()
            )
            each_a = a.reshape(EXPERTS, RANK, -1)
            made[other] = each_a.permute(2, 1, 0).reshape(a.shape[1], -1).contiguous()
    return made


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (rename("self_attn", "attn"), "left out, such as base_model.model.model.layers.0.attn."),
        (without_down, "not in the file, such as base_model.model.model.layers.1.mlp.experts."),
        (exchanged, "size mismatch for"),
        (rename("layers.0", "layers.7"), "left out, such as base_model.model.model.layers.7"),
    ],
)
def test_an_adapter_that_peft_reads_only_in_part_is_refused(
    world: Path, tmp_path: Path, change: Any, found: str
) -> None:
    """PEFT warns of missing keys, says nothing of the others, and would score what is left."""
    adapter = copy_adapter(world / "rank-major", tmp_path / "spoilt")
    path = adapter / "adapter_model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    model = ReferenceModel(world / "base", packing=RANK_MAJOR)
    with pytest.raises(AdapterNotRead) as caught:
        model.load("own", str(adapter), is_3d=False)
    said = str(caught.value)
    assert said.startswith(f"{adapter}: expected ") and found in said and said.endswith("`roster migrate`.")
    assert_untouched(model, world)


def test_what_peft_refuses_half_way_leaves_no_trace(world: Path, tmp_path: Path) -> None:
    """It comes to the experts when attention is adapted already."""
    adapter = copy_adapter(world / "rank-major", tmp_path / "spoilt")
    state(adapter, lora_dropout=0.1)
    model = ReferenceModel(world / "base", packing=RANK_MAJOR)
    with pytest.raises(AdapterNotRead, match=r"expected an adapter that PEFT reads, found .*lora_dropout"):
        model.load("own", str(adapter), is_3d=False)
    assert_untouched(model, world)


def test_an_adapter_without_weights_is_asked_of_no_hub(world: Path, tmp_path: Path) -> None:
    adapter = copy_adapter(world / "rank-major", tmp_path / "spoilt")
    (adapter / "adapter_model.safetensors").rename(adapter / "weights.safetensors")
    model = ReferenceModel(world / "base", packing=RANK_MAJOR)
    with pytest.raises(
        AdapterNotRead, match=r"spoilt: expected adapter_model\.safetensors, found no such file"
    ):
        model.load("own", str(adapter), is_3d=False)


def test_square_factors_are_read_only_as_the_same_peft_wrote_them(tmp_path: Path) -> None:
    """With in = out everywhere no shape tells which factor is which (PEFT 0.18.1 and 0.19.1 write them exchanged)."""
    # hidden = inter is square for down alone; gate_up is then left out
    save_base(tmp_path / "base", bos=False, hidden=24, inter=24)
    save_adapter(tmp_path / "base", tmp_path / "own", target_parameters=["mlp.experts.down_proj"])
    model = ReferenceModel(tmp_path / "base", packing=RANK_MAJOR)
    model.load("own", str(tmp_path / "own"), is_3d=False)
    model.unload("own")
    for version in ("0.18.1", "0.19.0", None):
        state(tmp_path / "own", peft_version=version)
        if version is None:
            config = json.loads((tmp_path / "own" / "adapter_config.json").read_text())
            assert "peft_version" not in config
        with pytest.raises(AdapterNotRead) as caught:
            model.load("own", str(tmp_path / "own"), is_3d=False)
        assert f"found peft_version {version}" in str(caught.value)
        assert "a peft_version that reads stacked factors of equal sides as PEFT 0." in str(caught.value)


def test_the_base_is_known_by_the_digest_that_registration_gives_it(world: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    digest = digest_weights(world / "base", lambda done, total: seen.append((done, total)))
    assert digest == weights_digest(world / "base", lambda done, total: None)
    assert seen[-1][0] == seen[-1][1] > 0
    for name in ("b.bin", "a.bin"):
        (tmp_path / name).write_bytes(name.encode() * 5)
    assert digest_weights(tmp_path, lambda *_: None) == weights_digest(tmp_path, lambda *_: None)
    with pytest.raises(
        ModelUnusable, match=r"expected \*\.safetensors or \*\.bin files, found none\. Give the"
    ):
        digest_weights(world, lambda *_: None)


class Sink:
    """A store that keeps nothing: what is looked at is how a file is read."""

    def put(self, key: str, body: bytes) -> None:
        assert key == "heldout/ann/main.jsonl"


LINES = (
    '{"id": "1", "text": "é"}\n\n{"id": "2", "prompt": "p", "text": "t", "year": 1999}\r\n',
    '{"id": "1", "text": "one"}\n{"id": "1", "text": "two"}',
    '{"id": "1", "text": " "}',
    '{"id": "1", "prompt": "", "text": "t"}',
    '{"id": 1, "text": "t"}',
    '{"id": "1"}',
    "[]",
    "not json",
    "\n \n",
    '\ufeff{"id": "1", "text": "t"}',
)


@pytest.mark.parametrize("lines", [*(line.encode() for line in LINES), b'{"id": "1", "text": "\xff"}'])
def test_held_out_files_are_read_as_registration_reads_them(tmp_path: Path, lines: bytes) -> None:
    path = tmp_path / "ann" / "main.jsonl"
    path.parent.mkdir()
    path.write_bytes(lines)
    try:
        theirs = register_heldout(cast(S3Store, Sink()), "ann", "main", path)
    except InvalidDocument:
        with pytest.raises(HeldoutFileInvalid, match=rf"^{re.escape(str(path))}"):
            read_heldout_file(str(path))
        return
    ours = read_heldout_file(f"ann/main={path}")
    assert ours == read_heldout_file(str(path))
    assert ours.sha256 == theirs.sha256
    units = tuple(Unit(unit.id, unit.text, unit.prompt) for unit in theirs.units)
    assert ours.heldout == HeldoutUnits("ann/main", units)


def test_a_set_needs_the_name_it_is_registered_by(tmp_path: Path) -> None:
    path = tmp_path / "Main.jsonl"
    path.write_text('{"id": "1", "text": "t"}')
    with pytest.raises(HeldoutFileInvalid) as caught:
        read_heldout_file(str(path))
    assert "the name of a held-out set" in str(caught.value) and "AUTHOR/NAME=FILE" in str(caught.value)


# The command.


def write_sets(folder: Path) -> tuple[list[str], dict[str, list[Unit]]]:
    sets = {
        "ann/main": [Unit("1", "One text."), Unit("2", "Another, é, longer text.")],
        "ann/more": [Unit("1", "An answer.", "Q: "), Unit("2", "<s>")],
    }
    arguments = []
    for name, units in sets.items():
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        lines = [{"id": u.id, "text": u.text} | ({"prompt": u.prompt} if u.prompt else {}) for u in units]
        path.write_text("\n".join(json.dumps(line) for line in lines))
        arguments.append(str(path))
    return arguments, sets


def test_the_command_writes_what_a_submission_takes(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, sets = write_sets(tmp_path)
    out = tmp_path / "reference.json"
    base, adapter = world / "base-bos", world / "rank-major"
    arguments = [
        str(base),
        str(adapter),
        *files,
        "--packing",
        "rank_major",
        "--window",
        "20",
        "--stride",
        "7",
    ]
    assert main([*arguments, "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert said.out == "" and "ann/main: own " in said.err and f"--reference {out}" in said.err
    reference = Reference.model_validate_json(out.read_text())

    model = ReferenceModel(base, max_model_len=21, packing=RANK_MAJOR)
    start = model.tokenize("x", add_special_tokens=True)[0]
    for name, units in sets.items():
        found = reference.heldout[name]
        assert (found.units, found.bytes) == (2, sum(len(unit.text.encode()) for unit in units))
        for value, reader in (
            (found.base_bpb, read_model(base, None)),
            (found.own_bpb, read_model(base, adapter)),
        ):
            bits = 0.0
            for unit in units:
                prompt = model.tokenize(unit.prompt or "", add_special_tokens=False)
                ids = [start, *prompt, *model.tokenize(unit.text, add_special_tokens=False)]
                covered = 1 + len(prompt)
                for begin in range(0, len(ids), 7):
                    end = min(begin + 20, len(ids))
                    if end > covered:
                        bits += bits_from(reader, ids[begin:end], covered - begin)
                        covered = end
            assert value == pytest.approx(bits / found.bytes, rel=1e-6)
        assert relative(found.own_bpb, found.base_bpb) > 1e-4
    assert reference.measure_id == measure_id(
        heldout_sha256s=[read_heldout_file(file).sha256 for file in files],
        unit_kind=UnitKind.MIXED,
        window=20,
        stride=7,
        bos_rule=BosRule.ONE_BOS,
        base_weights_digest=weights_digest(base, lambda done, total: None),
    )


def test_the_scores_go_to_stdout_and_the_rest_beside_it(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, _ = write_sets(tmp_path)
    assert (
        main([str(world / "base"), str(world / "grouped"), files[0], "--packing", "grouped_by_expert"]) == 0
    )
    said = capsys.readouterr()
    assert list(json.loads(said.out)["heldout"]) == ["ann/main"]
    assert f"window {CONTEXT - 1}, stride {(CONTEXT - 1) // 2}, first_token_left_out" in said.err


def test_a_dry_run_counts_and_reads_no_weights(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, sets = write_sets(tmp_path)
    base = copy_adapter(world / "base-bos", tmp_path / "no-weights")
    (base / "model.safetensors").unlink()
    assert main([str(base), str(world / "grouped"), *files, "--dry-run"]) == 0
    said = capsys.readouterr()
    tokens = sum(
        1 + len((unit.prompt or "").encode()) + len(unit.text.replace("<s>", "x").encode())
        for units in sets.values()
        for unit in units
    )
    assert said.out == ""
    assert f"2 sets, 4 units (0 cannot be scored): {tokens} tokens in 4 windows, scored twice" in said.err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["{world}/base", "{world}/grouped", "{heldout}"], 2, "found neither. Say --packing"),
        (
            ["{world}/base", "{world}/nowhere", "{heldout}", "--packing", "rank_major"],
            1,
            "expected adapter_config.json, found no such file",
        ),
        (["{world}/nowhere", "{world}/grouped", "{heldout}"], 2, "expected a config.json and a tokenizer"),
        (["{world}/base", "{world}/grouped", "ann/x={world}/nowhere.jsonl"], 2, "nowhere.jsonl"),
        (["{world}/base", "{world}/grouped", "{heldout}", "--device", "cuda:7"], 2, "cuda:7: expected "),
        (["{world}/base", "{world}/grouped", "{heldout}", "--stride", "90"], 2, "stride 90, window 63"),
        (["{world}/base", "{world}/grouped", "{heldout}", "--out", "{world}/no/f"], 2, "does not exist"),
    ],
)
def test_what_cannot_be_scored_is_said_with_an_exit_code(
    world: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    if "cuda:7" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    files, _ = write_sets(tmp_path)
    assert main([argument.format(world=world, heldout=files[0]) for argument in arguments]) == code
    found = capsys.readouterr()
    assert found.out == "" and said in found.err and "Traceback" not in found.err


@pytest.mark.parametrize("number", ["0", "-3", "many"])
def test_a_window_is_a_number_of_tokens(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["base", "adapter", "ann/main=x", f"--window={number}"])
    assert ended.value.code == 2
    assert f"expected a whole number of tokens, at least 1, found '{number}'" in capsys.readouterr().err


def test_a_missing_library_is_named_with_what_to_install(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        LibraryMissing, match=r"expected transformers and peft, found no peft\. Install .*pip install"
    ):
        ReferenceModel(world / "base")
    files, _ = write_sets(tmp_path)
    assert main([str(world / "base"), str(world / "grouped"), *files]) == 3


def test_every_error_keeps_its_facts() -> None:
    kinds = (LibraryMissing, ModelUnusable, HeldoutFileInvalid, PackingUnstated, AdapterNotRead)
    assert set(ReferenceScoringError.__subclasses__()) == set(kinds)
    for kind in kinds:
        error = kind("where", "this", "that", "Do so.")
        assert str(error) == "where: expected this, found that. Do so."
        assert error.args == (error.where, error.expected, error.found, error.advice)
