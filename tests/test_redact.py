"""Addresses that carry a secret are recorded and shown without it, and change nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pipeline_builders import Desk

import tasks.page
from storage.ledger import StepKind
from storage.training import redact_uri

SECRET = "S3CR3T"


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        (f"https://host/merged/?X-Amz-Credential=AK&X-Amz-Signature={SECRET}", "https://host/merged/?…"),
        (f"https://user:{SECRET}@host/merged", "https://…@host/merged"),
        (f"https://user:p@{SECRET}@host/merged#frag", "https://…@host/merged?…"),
        (f"s3://key:{SECRET}@bucket/merged", "s3://…@bucket/merged"),
        (f"user:{SECRET}@host:/merged", "…@host:/merged"),
        (f"https://user%3A{SECRET}%40host/merged", "https://…@host/merged"),
        (f"https://host/merged%3FX-Amz-Signature={SECRET}", "https://host/merged?…"),
        (f"https://host/merged%253Fsig={SECRET}", "https://host/merged?…"),
        (f"https://host/merged;token={SECRET}", "https://host/merged?…"),
        (f"https://host/sas_token={SECRET}/merged", "https://host/sas_token=…/merged"),
        (f"[no address?password={SECRET}", "[no address?…"),
    ],
)
def test_no_secret_is_left(uri: str, shown: str) -> None:
    assert SECRET in uri and redact_uri(uri) == shown


@pytest.mark.parametrize("uri", ["s3://bucket/uploads/a/r/merged", "/data/merged run", "file:///data/x%20y"])
def test_an_address_without_one_is_shown_whole(uri: str) -> None:
    assert redact_uri(uri) == uri


def test_a_presigned_merged_checkpoint_is_nowhere_in_ledger_page_or_log(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pages: list[str] = []
    monkeypatch.setattr(tasks.page, "create_markdown_artifact", lambda page, key: pages.append(page))
    folder = desk.adapter("alder")

    def submit(signature: str) -> dict[str, Any]:
        uri = f"https://host/merged?X-Amz-Signature={signature}"
        stated = {"merged_checkpoint": uri, "lora_B_layout": "rank_major"}
        (folder / "training.json").write_text(json.dumps(stated))
        desk.submit("alder", folder)
        assert desk.run("alder").name == "Ready"
        ledger = desk.ledger("alder")
        assert SECRET not in ledger.model_dump_json() and "https://host/merged?…" in ledger.model_dump_json()
        return {step.kind.value: step for step in ledger.steps}

    desk.heldout("alder")
    first = submit(f"{SECRET}-1")
    second = submit(f"{SECRET}-2")
    assert first[StepKind.CHECKED].step_key != second[StepKind.CHECKED].step_key, (
        "another training.json is another key, although both addresses are shown alike"
    )
    assert len(pages) == 2 and SECRET not in "".join(pages) and SECRET not in caplog.text
