"""How deep a check looks, what each depth lists, and what the report says of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_builders import (
    EXPERTS,
    LABEL,
    LAYERS,
    PREFIX,
    Logical,
    attention,
    encode,
    look,
    make_base,
    mark,
    save_adapter,
)
from safetensors.torch import load_file, save_file

from bench.fuzz_adapters import list_uploads
from tasks.checklist import check_rows, error_rows
from tasks.lora.base import read_base_config
from tasks.lora.check import check_conversion
from tasks.lora.check_headers import check_config
from tasks.lora.checks import (
    CheckName,
    CheckReport,
    CheckResult,
    Depth,
    Proof,
    describe_proof,
    find_failure,
    raise_for,
)
from tasks.lora.config import parse_adapter_config
from tasks.lora.convert import convert_adapter
from tasks.lora.errors import DeltaMismatch, DeviceMissing, LayoutConflict
from tasks.lora.expected import list_served
from tasks.lora.inspect import Inspection, inspect_adapter
from tasks.lora.layouts import Packing
from tasks.lora.packing import Evidence, Source, Strength
from tasks.lora.plan import plan_conversion
from tasks.lora.target import TargetFormat, format_target_config
from tasks.records import check_record

Tensors = dict[str, torch.Tensor]
UP = f"{PREFIX}.1.mlp.experts.2.up_proj"
SEED = 11


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Inspection:
    return look(tmp_path_factory.mktemp("source"), encode(Logical()) | attention())


def convert(
    found: Inspection,
    folder: Path,
    change: Callable[[Tensors], Any] | None = None,
    format: TargetFormat = TargetFormat.PER_EXPERT,
    **config: Any,
) -> Path:
    convert_adapter(found.files, plan_conversion(found.layout, format), folder)
    if change is not None:
        weights = folder / "adapter_model.safetensors"
        tensors = load_file(weights)
        change(tensors)
        save_file(tensors, weights)
    if config:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def check(found: Inspection, folder: Path, depth: Depth = Depth.STANDARD, **more: Any) -> CheckReport:
    return check_conversion(found.files, folder, found.layout, depth=depth, **{"seed": SEED, **more})


def failed(report: CheckReport) -> list[str]:
    return [one.name for one in report.checks if not one.passed]


def result(report: CheckReport, name: CheckName) -> CheckResult:
    return next(one for one in report.checks if one.name is name)


# Depths


def test_a_depth_never_lists_a_check_that_it_does_not_make(found: Inspection, tmp_path: Path) -> None:
    folder = convert(found, tmp_path / "made")
    reports = {depth: check(found, folder, depth) for depth in Depth}
    assert all(report.passed for report in reports.values())
    assert reports[Depth.QUICK].not_made == (CheckName.IN_RANGE, CheckName.ROUND_TRIP, CheckName.MERGED)
    assert reports[Depth.STANDARD].not_made == reports[Depth.FULL].not_made == (CheckName.MERGED,)
    for report in reports.values():
        assert [one.name for one in report.checks] == [
            name for name in CheckName if name not in report.not_made
        ], "in the order of the enumeration"
        # 3 projections of the experts and 5 modules in each layer, all with a distribution of their own.
        assert {one.projection for one in report.errors} == {
            *("gate_proj", "up_proj", "down_proj"),
            *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate"),
        }
        assert result(report, CheckName.DELTAS).figures[0] == ("pairs", LAYERS * (3 * EXPERTS + 5))


@pytest.mark.parametrize("depth", Depth)
@pytest.mark.parametrize(
    ("name", "change", "failures"),
    [
        ("scaled", lambda t: t[f"{UP}.lora_B.weight"].mul_(1.01), ["deltas", "round_trip"]),
        ("negated", lambda t: t[f"{UP}.lora_A.weight"].neg_(), ["shared_a", "deltas"]),
        (
            "nan",
            lambda t: t[f"{UP}.lora_B.weight"].view(-1)[4:5].fill_(torch.nan),
            ["finite", "deltas", "round_trip"],
        ),
        ("zeroed", lambda t: t[f"{UP}.lora_B.weight"].zero_(), ["deltas", "round_trip"]),
    ],
)
def test_every_depth_names_the_expert_that_was_damaged(
    found: Inspection,
    tmp_path: Path,
    depth: Depth,
    name: str,
    change: Callable[[Tensors], Any],
    failures: list[str],
) -> None:
    report = check(found, convert(found, tmp_path / "made", change), depth)
    assert failed(report) == [one for one in failures if one not in report.not_made]
    assert result(report, CheckName.DELTAS).where == "layer 1 expert 2 up_proj"
    [errors] = [one for one in report.errors if one.projection == "up_proj"]
    assert (errors.differing, errors.worst) == (1, "layer 1 expert 2")
    assert errors.median < 1e-6
    if name == "scaled":
        assert errors.largest == pytest.approx(0.01, rel=1e-4)
    with pytest.raises(DeltaMismatch if name != "nan" else Exception):
        raise_for(report)


def test_only_standard_sees_a_bit_that_probes_take_for_rounding(found: Inspection, tmp_path: Path) -> None:
    """What quick cannot show: damage far below its stated bound."""

    def flip(tensors: Tensors) -> None:
        tensors[f"{UP}.lora_B.weight"].view(torch.int32)[3, 1] ^= 1

    folder = convert(found, tmp_path / "made", flip)
    assert check(found, folder, Depth.STANDARD).passed is False
    assert "round_trip" in failed(check(found, folder, Depth.STANDARD))
    assert "round_trip" not in failed(check(found, folder, Depth.QUICK))


def test_the_same_seed_draws_the_same_probes_and_none_a_fresh_one(found: Inspection, tmp_path: Path) -> None:
    folder = convert(found, tmp_path / "made")
    assert check(found, folder, Depth.QUICK).probes.seed == SEED
    fresh = {check(found, folder, Depth.QUICK, seed=None).probes.seed for _ in range(3)}
    assert len(fresh) == 3, "nobody can make a file that pleases the probes"
    probes = check(found, folder, Depth.QUICK).probes
    assert probes.damage == 1e-3
    assert 0 < probes.miss_probability < 1e-6


def test_a_device_that_is_not_there_is_said_before_anything_is_read(
    found: Inspection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceMissing, match="no cuda device here"):
        check(found, tmp_path / "nowhere", Depth.FULL, device="cuda")
    folder = convert(found, tmp_path / "made")
    assert check(found, folder, Depth.STANDARD, device="cuda").device == "cpu", "nothing is made on it"


def test_every_pass_over_the_files_is_told(found: Inspection, tmp_path: Path) -> None:
    folder = convert(found, tmp_path / "made")
    passes = {}
    for depth in Depth:
        told: list[tuple[int, int]] = []
        check(found, folder, depth, progress=lambda done, total, told=told: told.append((done, total)))
        assert all(1 <= done <= total for done, total in told)
        passes[depth] = sum(done == total for done, total in told)
    assert passes == {Depth.QUICK: 1, Depth.STANDARD: 2, Depth.FULL: 3}


# Single checks


def test_trained_is_told_by_class_and_layer(tmp_path: Path) -> None:
    tensors = encode(Logical()) | attention()
    for name, tensor in tensors.items():
        if ".1." in name and "lora_B" in name and ("experts.base_layer" in name or "q_proj" in name):
            tensor.zero_()
    found = look(tmp_path / "source", tensors)
    folder = convert(found, tmp_path / "made")
    for depth in (Depth.QUICK, Depth.STANDARD):
        report = check(found, folder, depth)
        assert {kind.value: dict(layers) for kind, layers in report.trained.items()} == {
            "routed_experts": {0: (3 * EXPERTS, 3 * EXPERTS), 1: (EXPERTS, 3 * EXPERTS)},
            "attention": {0: (4, 4), 1: (3, 4)},
            "router": {0: (1, 1), 1: (1, 1)},
        }
        figures = dict(result(report, CheckName.TRAINED).figures)
        assert figures["routed_experts"] == pytest.approx(2 / 3)
        assert figures["still_layers"] == 0


def test_a_layer_in_which_nothing_moved_is_named_and_no_failure(tmp_path: Path) -> None:
    tensors = encode(Logical()) | attention()
    for name, tensor in tensors.items():
        if ".1.mlp.experts" in name and "lora_B" in name:
            tensor.zero_()
    found = look(tmp_path / "source", tensors)
    for depth in (Depth.QUICK, Depth.STANDARD):
        trained = result(check(found, convert(found, tmp_path / depth), depth), CheckName.TRAINED)
        assert trained.passed
        assert trained.detail.endswith("none in layer 1 of routed_experts")
        assert dict(trained.figures)["still_layers"] == 1


@pytest.mark.parametrize(
    ("format", "config", "said"),
    [
        ("per-expert", {"target_modules": ["gate_proj", "up_proj", "gate"]}, "down_proj is not targeted"),
        ("per-expert", {"lora_B_layout": "grouped_by_expert"}, "a marker says grouped_by_expert, not None"),
        ("stacked", {"target_parameters": []}, "down_proj is not targeted"),
        (
            "stacked",
            {"lora_B_layout": "grouped_by_expert"},
            "a marker says grouped_by_expert, not rank_major",
        ),
        (
            "stacked",
            {"lora_B_layout": None, "unsloth_fused_expert_lora": None},
            "a marker says no packing, not rank_major",
        ),
        (
            "stacked",
            mark(gate_up_proj="grouped_by_expert"),
            "a marker says grouped_by_expert, not rank_major",
        ),
    ],
)
def test_a_config_of_another_adapter_is_found(
    found: Inspection, tmp_path: Path, format: str, config: dict[str, Any], said: str
) -> None:
    target = TargetFormat(format)
    folder = convert(found, tmp_path / "made", None, target, **config)
    report = check_conversion(found.files, folder, found.layout, target)
    assert failed(report) == ["config"]
    assert said in result(report, CheckName.CONFIG).detail
    with pytest.raises(
        DeltaMismatch, match=r"author-17/run-3: adapter_config\.json: found .*; expected a config"
    ):
        raise_for(report)


def test_two_weight_files_are_not_what_is_served(found: Inspection, tmp_path: Path) -> None:
    folder = convert(found, tmp_path / "made")
    tensors = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    places = {}
    for number in (1, 2):
        name = f"adapter_model-{number:05}-of-00002.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[number - 1 :: 2]}
        save_file(part, folder / name)
        places |= dict.fromkeys(part, name)
    (folder / "adapter_model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert failed(check(found, folder)) == ["size"]


# The layout's evidence


def tell(found: Inspection, layer: int | None, says: Packing) -> Inspection:
    """The inspection, with the tensor of one layer of down_proj, or all of them together, naming a packing."""

    def change(decision: Any) -> Any:
        if decision.parameter != "down_proj":
            return decision
        if layer is not None:
            return replace(decision, told=((0, None), (layer, says)))
        evidence = Evidence(Source.TENSORS, says, Strength.MEASURED, "z 1.0 as rank_major, 40.0 as grouped")
        return replace(decision, evidence=(*decision.evidence, evidence))

    return replace(found, layout=replace(found.layout, packing=tuple(map(change, found.layout.packing))))


@pytest.mark.parametrize(
    ("layer", "where", "said"),
    [
        (1, "layer 1 down_proj", "layer 1's tensor is grouped_by_expert, read as rank_major"),
        (
            None,
            "the packing of down_proj",
            "the tensors say grouped_by_expert: z 1.0 as rank_major, 40.0 as grouped",
        ),
    ],
)
def test_a_forced_reading_that_tensors_contradict_is_named(
    found: Inspection, tmp_path: Path, layer: int | None, where: str, said: str
) -> None:
    """The operator's word wins at conversion; the check does not keep quiet about what speaks against it."""
    folder = convert(found, tmp_path / "made")
    report = check(tell(found, layer, Packing.GROUPED_BY_EXPERT), folder)
    assert failed(report) == ["layout"], "the conversion itself was carried out as decided"
    found_result = result(report, CheckName.LAYOUT)
    assert found_result.about is Proof.READING
    assert (found_result.where, said in found_result.detail) == (where, True)
    with pytest.raises(LayoutConflict):
        raise_for(report)
    assert describe_proof(report).startswith(
        "Execution: the output is the source as it was read, to the last bit."
    )
    assert "contradicted (layout)" in describe_proof(report)


def test_agreement_of_the_tensors_is_counted(found: Inspection, tmp_path: Path) -> None:
    report = check(tell(found, 1, Packing.RANK_MAJOR), convert(found, tmp_path / "made"))
    layout = result(report, CheckName.LAYOUT)
    assert layout.passed
    assert dict(layout.figures) == {"agree": 1, "disagree": 0, "silent": 2 * LAYERS - 1}
    assert (
        "down_proj rank_major by forced, tensors of 2 layers: 1 agree, 0 disagree, 1 silent" in layout.detail
    )


def test_one_layer_packed_otherwise_is_named_though_its_packing_was_forced(tmp_path: Path) -> None:
    """Real statistics: the tensors of one layer, structured as training leaves them, in the other packing."""
    generator = torch.Generator().manual_seed(5)
    experts, rank = 16, 8
    tensors = encode(Logical(rank=rank, experts=experts, hidden=48, inter=32))
    for layer in range(LAYERS):
        for parameter, out, inside in (("gate_up_proj", 64, 48), ("down_proj", 48, 32)):
            wrapper = "experts.base_layer" if parameter == "gate_up_proj" else "experts"
            stem = f"{PREFIX}.{layer}.mlp.{wrapper}"
            a = torch.randn(experts, rank, inside, generator=generator)
            gradient = torch.randn(experts, out, 2, generator=generator) @ torch.randn(
                experts, 2, inside, generator=generator
            )
            b = gradient @ a.transpose(1, 2)  # (experts, out, rank): the first step from zero
            grouped = layer == 1 and parameter == "down_proj"
            order = b.permute(1, 0, 2) if grouped else b.permute(1, 2, 0)
            tensors[f"{stem}.lora_A.weight"] = a.reshape(experts * rank, inside).contiguous()
            tensors[f"{stem}.lora_B.weight"] = order.reshape(out, experts * rank).contiguous()
    base = {"hidden_size": 48, "moe_intermediate_size": 32, "num_local_experts": experts}
    save_adapter(tmp_path / "source", tensors, r=rank, target_modules=[])
    sizes = make_base(**base)
    with pytest.raises(LayoutConflict):
        inspect_adapter(tmp_path / "source", sizes, label=LABEL)
    forced = inspect_adapter(tmp_path / "source", sizes, label=LABEL, forced=Packing.RANK_MAJOR)
    report = check(forced, convert(forced, tmp_path / "made"))
    assert failed(report) == ["layout"]
    assert result(report, CheckName.LAYOUT).where == "layer 1 down_proj"
    assert dict(result(report, CheckName.LAYOUT).figures) == {"agree": 3, "disagree": 1, "silent": 0}


# The report


def test_a_check_made_elsewhere_takes_its_place(found: Inspection, tmp_path: Path) -> None:
    report = check(found, convert(found, tmp_path / "made"))
    merged = CheckResult(CheckName.MERGED, True, "all as merged", ())
    more = report.adding(merged)
    assert [one.name for one in more.checks][-2:] == [CheckName.MERGED, CheckName.RESOLVES]
    assert more.not_made == ()
    assert "merged checkpoint agrees" in describe_proof(more)
    assert "the scores have to" in describe_proof(report)
    other = replace(merged, passed=False, error=LayoutConflict, where="layer 1 down_proj")
    error = find_failure(report.adding(other))
    assert type(error) is LayoutConflict, "the error that the check itself names"
    assert error.where == "layer 1 down_proj"


def test_all_failures_are_on_the_first(found: Inspection, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{PREFIX}.0.mlp.experts.2.up_proj.lora_B.weight"][0, 0] = torch.inf
        tensors.pop(f"{UP}.lora_A.weight")

    error = find_failure(check(found, convert(found, tmp_path / "made", change)))
    assert error is not None
    assert re.search(r"1 tensors missing, 0 too many", error.found)
    assert [type(one).__name__ for one in error.others] == [
        "RoundTripMismatch",
        "NonFinite",
        "DeltaMismatch",
        "RoundTripMismatch",
    ]
    assert find_failure(check(found, convert(found, tmp_path / "right"))) is None


def test_a_report_of_what_is_not_finite_can_be_stored_and_shown(found: Inspection, tmp_path: Path) -> None:
    """The ledger is strict JSON, and an error of infinity no number of it: the adapter would stop as `internal`."""

    def change(tensors: Tensors) -> None:
        tensors[f"{UP}.lora_B.weight"][0, 0] = torch.nan

    record = check_record(check(found, convert(found, tmp_path / "made", change), Depth.FULL))
    json.dumps(record, allow_nan=False)
    [up] = [one for one in record["errors"] if one["projection"] == "up_proj"]
    assert (up["largest"], up["median"], up["worst"]) == (None, 0.0, "layer 1 expert 2")
    [deltas] = [row for row in check_rows(record, passed="ok", failed="FAILED") if row[1] == "deltas"]
    assert deltas[0] == "FAILED" and "largest error not finite" in deltas[-1]
    [row] = [row for row in error_rows(record) if row[0] == "up_proj"]
    assert row[-2:] == ["not finite", "layer 1 expert 2"]


def test_every_check_says_what_it_is_about() -> None:
    about = {name: CheckResult(name, True, "", ()).about for name in CheckName}
    assert {name for name, proof in about.items() if proof is Proof.READING} == {"layout", "merged"}
    assert {name for name, proof in about.items() if proof is Proof.ADAPTER} == {
        "finite",
        "in_range",
        "trained",
    }
    assert {name for name, proof in about.items() if proof is Proof.ENGINE} == {"resolves"}


def test_the_config_that_is_written_targets_what_it_should_in_every_family(tmp_path: Path) -> None:
    """granitemoe's router is `router.layer` to transformers and `gate` to the engine."""
    uploads = [upload for upload in list_uploads() if upload.name.endswith(" stacked")]
    assert len(uploads) > 10
    for number, upload in enumerate(uploads):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, entry in upload.files.items():
            assert isinstance(entry, bytes)
            (folder / name).write_bytes(entry)
        sizes = read_base_config(upload.base, label=upload.name)
        layout = inspect_adapter(
            folder, sizes, label=LABEL, forced=Packing.RANK_MAJOR, header_only=True
        ).layout
        for format in TargetFormat:
            modules = list(list_served(layout, format))
            text = format_target_config(
                plan_conversion(layout, format).modules, format=format, base_model=None
            )
            config = parse_adapter_config(text, label=LABEL)
            result = check_config(config, layout, format, modules)
            assert result.passed, (upload.name, format, result.detail)
            fewer = {
                "target_modules": list(config.target_modules or ())[1:],
                "target_parameters": list(config.target_parameters or ())[1:],
            }
            assert not check_config(config.model_copy(update=fewer), layout, format, modules).passed
