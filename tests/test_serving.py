"""The manifest and the roster: what is refused, when the version moves, when a sync must stop and ask."""

import json
import pickle  # noqa: TID251 - errors cross process borders this way
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from roster.errors import RankNotServeable, RosterDrop, UnknownBase
from roster.rows import BaseRow, ReadyRow
from roster.serving import (
    EngineFlag,
    Manifest,
    Roster,
    build_roster,
    check_drop,
    smallest_max_lora_rank,
)

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
NOON, LATER = "2026-11-20T12:00:00Z", "2026-11-20T13:00:00Z"
BASES = [BaseRow("tiny", "tiny-model"), BaseRow("other", "other-model")]


def row(author: str, **changes: object) -> ReadyRow:
    plain = ReadyRow(
        base="tiny",
        author=author,
        adapter_digest="a" * 64,
        run="r1",
        submission="2026-11-20T11:00:00Z-00000001",
        served_model="tiny-model",
        output_digest="b" * 64,
        uri=f"s3://bucket/serving/{author}/{'b' * 64}/",
        format="per-expert",
        rank=3,
        max_lora_rank=8,
        is_3d_lora_weight=False,
        needs_mixed_format=False,
        own=2.125,
        base_bpb=2.375,
        control=2.25,
        margin=0.1875,
        interval_lower=0.15,
        interval_upper=0.22,
        wrong_adapters=3,
        measured_at=NOON,
        stale=False,
    )
    return plain._replace(**changes)  # type: ignore[arg-type]


def roster(*rows: ReadyRow, previous: Roster | None = None, at: str = NOON) -> Roster:
    return build_roster(rows, BASES, previous=previous, generated_at=at)


@pytest.mark.parametrize(("model", "name"), [(Manifest, "manifest.json"), (Roster, "roster.json")])
def test_the_example_in_the_docs_round_trips(model: type[Manifest] | type[Roster], name: str) -> None:
    written = json.loads((EXAMPLES / name).read_text())
    read = model.model_validate(written)
    assert json.loads(read.model_dump_json()) == written
    assert written["schema"] == 1


def test_a_manifest_tells_a_packing_that_varies_by_layer_and_evidence_that_says_nothing() -> None:
    written = json.loads((EXAMPLES / "manifest.json").read_text())
    down = written["layout"]["packing"]["mlp.experts.down_proj"]
    down |= {"value": "mixed", "layers": {"rank_major": [0, 2], "grouped_by_expert": [1]}}
    down["evidence"][0]["says"] = None
    read = Manifest.model_validate(written)
    assert json.loads(read.model_dump_json()) == written
    assert read.layout.packing["mlp.experts.down_proj"].layers == {
        "rank_major": (0, 2),
        "grouped_by_expert": (1,),
    }
    written["layout"]["packing"] = {}
    assert json.loads(Manifest.model_validate(written).model_dump_json()) == written


@pytest.mark.parametrize(("model", "name"), [(Manifest, "manifest.json"), (Roster, "roster.json")])
def test_unknown_keys_and_other_schemas_are_refused(model: type[Manifest] | type[Roster], name: str) -> None:
    written = json.loads((EXAMPLES / name).read_text())
    with pytest.raises(ValidationError, match="surprise"):
        model.model_validate({**written, "surprise": 1})
    with pytest.raises(ValidationError, match="schema"):
        model.model_validate({**written, "schema": 2})


@pytest.mark.parametrize("name", ["Anna", "a/b", "..", "", "a" * 65, "-a"])
def test_names_that_could_leave_their_folder_are_refused(name: str) -> None:
    written = json.loads((EXAMPLES / "manifest.json").read_text())
    with pytest.raises(ValidationError, match="author"):
        Manifest.model_validate({**written, "author": name})


@pytest.mark.parametrize("figure", [float("nan"), float("inf")])
def test_no_figure_of_the_roster_is_nan(figure: float) -> None:
    with pytest.raises(ValidationError, match="finite"):
        roster(row("anna", own=figure))


def test_roster_holds_every_row_under_its_base() -> None:
    made = roster(row("berta"), row("anna"), row("anna", base="other", margin=None, interval_lower=None))
    assert {base: list(entry.authors) for base, entry in made.bases.items()} == {
        "other": ["anna"],
        "tiny": ["anna", "berta"],
    }
    assert made.bases["other"].served_model == "other-model"
    assert made.bases["other"].authors["anna"].verdict.interval is None
    assert made.bases["tiny"].authors["anna"].verdict.interval == (0.15, 0.22)
    assert made.bases["tiny"].authors["berta"].verdict.base == 2.375


def test_version_moves_only_with_the_content() -> None:
    first = roster(row("anna"), row("berta"))
    assert first.version == 1
    same = roster(row("berta"), row("anna"), previous=first, at=LATER)
    assert same is first
    flagged = roster(row("anna", stale=True), row("berta"), previous=first, at=LATER)
    assert (flagged.version, flagged.generated_at) == (2, LATER)
    back = roster(row("anna"), row("berta"), previous=flagged, at=LATER)
    assert back.version == 3
    assert roster(previous=back).version == 4


def test_reading_the_previous_roster_back_makes_no_new_version() -> None:
    first = roster(row("anna", own=2.1234567890123457))
    stored = Roster.model_validate_json(first.model_dump_json())
    assert roster(row("anna", own=2.1234567890123457), previous=stored, at=LATER) is stored


# https://github.com/vllm-project/vllm/issues/2847: ranks between the legal ones need the next larger setting.
@pytest.mark.parametrize(
    ("rank", "legal"), [(1, 1), (2, 8), (4, 8), (8, 8), (48, 64), (257, 320), (512, 512)]
)
def test_engine_gets_the_smallest_legal_rank(rank: int, legal: int) -> None:
    assert smallest_max_lora_rank("anna", rank) == legal
    made = roster(row("anna", rank=1, max_lora_rank=1), row("berta", rank=rank, max_lora_rank=legal))
    assert made.bases["tiny"].engine.max_lora_rank == legal


# https://github.com/huggingface/trl/issues/6007: above 512 there is no legal setting.
def test_a_rank_above_the_largest_is_refused() -> None:
    with pytest.raises(RankNotServeable) as caught:
        smallest_max_lora_rank("anna", 513)
    message = str(caught.value)
    assert "anna" in message and "513" in message and "at most 512" in message and "smaller rank" in message
    assert str(pickle.loads(pickle.dumps(caught.value))) == message


# https://github.com/vllm-project/vllm/issues/38520: natively fused models need it.
def test_mixed_format_is_asked_for_only_where_needed() -> None:
    assert roster(row("anna"), row("berta")).bases["tiny"].engine.flags == ()
    made = roster(row("anna"), row("berta", needs_mixed_format=True), row("anna", base="other"))
    assert made.bases["tiny"].engine.flags == (EngineFlag.MIXED_MOE_LORA_FORMAT,)
    assert made.bases["other"].engine.flags == ()


def test_advice_on_slots_follows_the_authors_up_to_a_limit() -> None:
    slots = [roster(*(row(f"a{i}") for i in range(n))).bases["tiny"].engine.max_loras for n in (1, 3, 4, 30)]
    assert slots == [1, 3, 4, 4]


def test_a_base_that_is_not_registered_is_refused() -> None:
    with pytest.raises(UnknownBase) as caught:
        roster(row("anna", base="strange"))
    message = str(caught.value)
    assert "anna" in message and "strange" in message and "tiny" in message and "roster base add" in message
    assert pickle.loads(pickle.dumps(caught.value)).known == ("other", "tiny")


@pytest.mark.parametrize(
    ("before", "dropped", "stops"),
    [
        (30, 6, False),
        (30, 7, True),
        (14, 3, True),
        (15, 3, False),
        (3, 3, True),
        (2, 2, False),
        (10, 2, False),
    ],
)
def test_drop_breaker(before: int, dropped: int, stops: bool) -> None:
    authors = [row(f"author-{number:02}") for number in range(before)]
    old, new = roster(*authors), roster(*authors[dropped:], row("newcomer"))
    if not stops:
        check_drop(old, new)
        return
    with pytest.raises(RosterDrop) as caught:
        check_drop(old, new)
    error = caught.value
    assert error.dropped == tuple(f"tiny/author-{number:02}" for number in range(dropped))
    assert (error.before, error.limit) == (before, max(2, before // 5))
    message = str(error)
    assert "roster/current.json" in message and f"found {dropped}" in message and "--allow-drop" in message
    assert f"at most {error.limit} of {before}" in message
    assert str(pickle.loads(pickle.dumps(error))) == message


def test_drop_breaker_lets_the_first_roster_pass() -> None:
    check_drop(None, roster(row("anna")))


def test_the_engine_can_read_rosters_without_duckdb() -> None:
    program = "import roster.serving, sys; sys.exit('duckdb' in sys.modules or 'boto3' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_leaving_one_of_two_bases_is_a_drop() -> None:
    both = [row(f"a{i}", base=base) for i in range(4) for base in ("tiny", "other")]
    with pytest.raises(RosterDrop, match="other/a0, other/a1, other/a2, other/a3"):
        check_drop(roster(*both), roster(*(one for one in both if one.base == "tiny")))
