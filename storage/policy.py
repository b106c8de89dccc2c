"""An operator's rule for adapters that do not say themselves how their experts are packed.

One document for the whole bucket, and one for each base, which goes before it. A statement of the adapter's own (a
marker, its training.json) goes before both.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from storage.documents import RootDocument, UtcTime, put_document, read_document
from storage.errors import ObjectNotFound
from storage.keys import policy_key
from storage.s3 import S3Store

PackingName = Literal["rank_major", "grouped_by_expert"]
Line = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class PolicyDocument(RootDocument):
    """policy.json. `lora_B_layout` is one packing for every parameter, or one for each that is named.

    `set_by` is the user who set it, `why` is the operator's own reason.
    """

    lora_b_layout: PackingName | dict[str, PackingName] = Field(alias="lora_B_layout")
    why: Line
    set_by: Line
    set_at: UtcTime


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy that is in force. `key` says where it stands, `base` for which base: None for all of the bucket."""

    base: str | None
    document: PolicyDocument

    @property
    def key(self) -> str:
        """Return where it stands in the store."""
        return policy_key(self.base)

    @property
    def digest(self) -> str:
        """Return what it is known by, 64 hex characters: what it says and for whom, not why or since when."""
        said = json.dumps([self.base, self.document.lora_b_layout], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()


def put_policy(store: S3Store, policy: Policy) -> None:
    """Write a policy, over an earlier one of its base or bucket.

    Raises StoreUnavailable.
    """
    put_document(store, policy.key, policy.document)


def clear_policy(store: S3Store, base: str | None) -> bool:
    """Take a policy away; tell whether there was one.

    Raises InvalidName, StoreUnavailable.
    """
    there = store.head(policy_key(base)) is not None
    if there:
        store.delete(policy_key(base))
    return there


def read_policy(store: S3Store, base: str | None) -> Policy | None:
    """Return the policy that was set for exactly this base, or with None for the bucket; None if there is none.

    Raises InvalidName, InvalidDocument, StoreUnavailable.
    """
    try:
        document, _ = read_document(store, policy_key(base), PolicyDocument)
    except ObjectNotFound:
        return None
    return Policy(base, document)


def find_policy(store: S3Store, base: str) -> Policy | None:
    """Return the policy that applies to adapters of a base: the base's own, else the bucket's, else None.

    Raises InvalidName, InvalidDocument, StoreUnavailable.
    """
    return read_policy(store, base) or read_policy(store, None)
