import json
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError
from store_builders import make_step, memory_store

from storage.bases import BaseDocument
from storage.documents import decode_document, encode_document, format_time, put_document, read_document
from storage.errors import InvalidDocument
from storage.heldout import HeldoutUnit
from storage.ledger import Claim, Ledger, Outcome, Step, StepKind, SubmissionRef
from storage.policy import PolicyDocument
from storage.training import Training
from storage.uploads import UploadMarker

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
MODELS: dict[str, type[BaseModel]] = {
    "upload": UploadMarker,
    "training": Training,
    "base": BaseDocument,
    "heldout_unit": HeldoutUnit,
    "ledger": Ledger,
    "policy": PolicyDocument,
}


@pytest.mark.parametrize("name", MODELS)
def test_the_documented_examples_round_trip_byte_for_byte(name: str) -> None:
    body = (EXAMPLES / f"{name}.json").read_bytes()
    document = decode_document(name, body, MODELS[name])
    assert encode_document(name, document) == body
    assert set(json.loads(body)) == {
        field.alias or key for key, field in MODELS[name].model_fields.items() if not field.exclude_if
    }, "the example shows every key"


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("upload", []),
        ("upload", ["files", 0]),
        ("base", []),
        ("base", ["engine"]),
        ("ledger", []),
        ("ledger", ["claim"]),
        ("ledger", ["steps", 1]),
        ("ledger", ["submissions", 0]),
        ("policy", []),
    ],
)
def test_what_we_write_refuses_unknown_keys_at_every_depth(name: str, path: list[str | int]) -> None:
    values = part = json.loads((EXAMPLES / f"{name}.json").read_text())
    for step in path:
        part = part[step]
    part["surprise"] = 1
    at = ".".join(map(str, [*path, "surprise"]))
    with pytest.raises(InvalidDocument, match=f"key/of/it: .*: {at}: Extra inputs are not permitted"):
        decode_document("key/of/it", json.dumps(values).encode(), MODELS[name])


@pytest.mark.parametrize("name", ["upload", "training", "base", "ledger", "policy"])
def test_another_schema_is_refused(name: str) -> None:
    values = json.loads((EXAMPLES / f"{name}.json").read_text()) | {"schema": 2}
    with pytest.raises(InvalidDocument, match="schema: Input should be 1"):
        decode_document("k", json.dumps(values).encode(), MODELS[name])


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"<Error>", b'{"schema": 1'])
def test_bytes_that_are_no_document_name_their_key(body: bytes) -> None:
    with pytest.raises(InvalidDocument, match=r"ledger/a/b.json: not a document we can use: Invalid JSON"):
        decode_document("ledger/a/b.json", body, Ledger)


def test_a_refusal_names_the_faulty_fields() -> None:
    values = json.loads((EXAMPLES / "ledger.json").read_text())
    values["steps"][1]["outcome"] = "fine"
    values["author"] = "Ada"
    with pytest.raises(InvalidDocument) as caught:
        decode_document("k", json.dumps(values).encode(), Ledger)
    assert "steps.1.outcome: Input should be 'done', 'ready'" in caught.value.reason
    assert "author: Value error, author 'Ada': expected 1 to 64 characters" in caught.value.reason


class Loose(BaseModel):
    value: float | str


NON_FINITE = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("value", [*NON_FINITE, "\ud800"])
def test_what_json_cannot_say_is_refused_and_not_written(value: float | str) -> None:
    with pytest.raises(InvalidDocument, match=r"^here: not a document we can use: "):
        encode_document("here", Loose(value=value))


@pytest.mark.parametrize("value", NON_FINITE)
def test_a_step_result_holds_no_number_that_json_cannot_say(value: float) -> None:
    with pytest.raises(ValidationError, match=r"result\.own\.list\.1.*\n *Input should be a finite number"):
        make_step(own=[1.5, value])


def test_text_is_written_as_it_is() -> None:
    body = encode_document("k", HeldoutUnit(id="1", text="naïve ☃ \u2028 end"))
    assert "naïve ☃ \u2028 end".encode() in body
    assert body.endswith(b"}\n")


def test_times_are_utc_to_the_second() -> None:
    east = timezone(timedelta(hours=5, minutes=30))
    claim = Claim(holder="w", expires_at=datetime(2026, 3, 1, 3, 30, 59, 999_999, tzinfo=east))
    assert claim.expires_at == datetime(2026, 2, 28, 22, 0, 59, tzinfo=UTC)
    assert format_time(claim.expires_at) == "2026-02-28T22:00:59Z"
    with pytest.raises(ValidationError, match="timezone"):
        Claim(holder="w", expires_at=datetime(2026, 3, 1))


def test_a_verdict_ends_ready_and_other_steps_end_done() -> None:
    for kind in StepKind:
        right, wrong = (Outcome.READY, Outcome.DONE)[:: 1 if kind is StepKind.VERDICT else -1]
        assert make_step(kind, right).outcome is right
        with pytest.raises(ValidationError, match=f"a step of kind {kind} does not end {wrong}"):
            make_step(kind, wrong)


def test_documents_are_read_back_from_the_store_as_written() -> None:
    step = make_step(list=[1, 2.5, None, {"a": "é"}], nested={"x": [True]})
    with memory_store() as store:
        etag = put_document(store, "steps/1.json", step)
        assert read_document(store, "steps/1.json", Step) == (step, etag)


@pytest.mark.parametrize(
    "text", ["2026-03-01", "2026-03-01T10:00:00Z-XYZ", "2026-03-01T10:00:00Z-0a1b2c3d\n"]
)
def test_submissions_have_one_form(text: str) -> None:
    with pytest.raises(ValidationError, match="String should match pattern"):
        SubmissionRef(run="r", submission=text)
