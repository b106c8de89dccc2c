"""The operator's packing policy: which one applies, what it is known by, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from lora_builders import base_fields
from store_builders import memory_store

from storage.bases import BaseDocument, BaseEngine, TargetFormat, register_base
from storage.errors import InvalidDocument, InvalidName, UnknownBase
from storage.policy import PackingName, Policy, find_policy, read_policy
from storage.s3 import S3Store
from tasks.policy import drop_policy, list_policies, set_policy
from tasks.records import policy_statement


@pytest.fixture
def store() -> Iterator[S3Store]:
    with memory_store() as empty:
        document = BaseDocument(
            base="tiny",
            served_model="tiny",
            weights_digest=None,
            engine=BaseEngine(),
            target_format=TargetFormat.PER_EXPERT,
        )
        register_base(empty, json.dumps(base_fields()).encode(), document)
        yield empty


def put(store: S3Store, packing: PackingName = "grouped_by_expert", **more: Any) -> Policy:
    return set_policy(store, packing, why="our trainer is old", set_by="mara", **more)


def test_a_policy_is_kept_with_who_set_it_and_why(store: S3Store) -> None:
    policy = put(store)
    written = json.loads(store.get("policy.json").body)
    assert set(written) == {"schema", "lora_B_layout", "why", "set_by", "set_at"}
    assert (written["lora_B_layout"], written["why"], written["set_by"]) == (
        "grouped_by_expert",
        "our trainer is old",
        "mara",
    )
    assert find_policy(store, "tiny") == read_policy(store, None) == policy


def test_a_bases_own_policy_goes_before_the_buckets(store: S3Store) -> None:
    assert find_policy(store, "tiny") is None
    bucket, own = put(store), put(store, "rank_major", base="tiny")
    assert own.key == "bases/tiny/policy.json"
    assert find_policy(store, "tiny") == own and find_policy(store, "small") == bucket
    assert list_policies(store) == (bucket, own)
    assert drop_policy(store, "tiny") and not drop_policy(store, "tiny")
    assert find_policy(store, "tiny") == bucket
    assert drop_policy(store, None) and list_policies(store) == ()


def test_one_parameter_is_changed_and_the_others_keep_what_applied(store: S3Store) -> None:
    alone = put(store, parameter="down_proj")
    assert alone.document.lora_b_layout == {"down_proj": "grouped_by_expert"}, "nothing applied to the other"
    put(store, "rank_major")
    both = {"down_proj": "grouped_by_expert", "gate_up_proj": "rank_major"}
    assert put(store, base="tiny", parameter="down_proj").document.lora_b_layout == both
    assert put(store, "rank_major", base="tiny", parameter="down_proj").document.lora_b_layout == {
        "down_proj": "rank_major",
        "gate_up_proj": "rank_major",
    }
    statement = policy_statement(find_policy(store, "tiny"))
    assert statement is not None and statement.where == "bases/tiny/policy.json"
    assert statement.layout is None and dict(statement.layouts) == dict.fromkeys(both, "rank_major")


def test_what_a_policy_is_known_by_changes_with_what_it_says_alone(store: S3Store) -> None:
    first = put(store).digest
    again = set_policy(store, "grouped_by_expert", why="another reason", set_by="jo")
    assert again.digest == first
    others = [put(store, "rank_major").digest, put(store, base="tiny").digest]
    others.append(put(store, parameter="down_proj").digest)
    assert len({first, *others}) == 4


def test_a_policy_for_what_is_not_known_is_refused(store: S3Store) -> None:
    with pytest.raises(UnknownBase, match=r"base 'tinny': expected a registered base, found: tiny"):
        put(store, base="tinny")
    with pytest.raises(UnknownBase):
        drop_policy(store, "tinny")
    for base in (None, "tiny"):
        with pytest.raises(InvalidName, match=r"parameter 'up': expected one of down_proj, gate_up_proj"):
            put(store, base=base, parameter="up")
    assert list_policies(store) == ()


@pytest.mark.parametrize(
    ("field", "value"), [("lora_B_layout", "columns"), ("why", " "), ("lora_B_layout", {"down_proj": "x"})]
)
def test_a_policy_that_was_damaged_is_told_and_not_guessed_at(store: S3Store, field: str, value: Any) -> None:
    put(store)
    body = json.loads(store.get("policy.json").body) | {field: value}
    store.put("policy.json", json.dumps(body).encode())
    with pytest.raises(InvalidDocument, match=f"policy.json: .*{field}"):
        find_policy(store, "tiny")
