"""A listing of a bucket, one page after the other until it comes to its end; for storage/s3.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from storage.answers import CUT_SHORT, FAULTS, as_ours
from storage.errors import StoreNotTrusted


def list_pages(client: Any, bucket: str, prefix: str, **extra: str) -> Iterator[Any]:
    """Yield the answers of list_objects_v2 for a prefix; one that came short is asked for once more.

    Raises StoreUnavailable, StoreNotTrusted for a listing that has no end.
    """
    endpoint = str(client.meta.endpoint_url)
    seen: set[str] = set()
    token: dict[str, str] = {}
    while True:
        try:
            page = _page(client, Bucket=bucket, Prefix=prefix, **extra, **token)
        except FAULTS as error:
            raise as_ours(endpoint, "list", prefix, error) from error
        yield page
        if not page.get("IsTruncated"):
            return
        following = page.get("NextContinuationToken")
        probe = f"listing {prefix} must come to an end"
        if not following:
            found = "a page that says there is more, but not how to ask for it"
            raise StoreNotTrusted(endpoint, probe, found)
        if following in seen:
            raise StoreNotTrusted(endpoint, probe, "a page that leads back to one already read")
        seen.add(following)
        token = {"ContinuationToken": following}


def _page(client: Any, **wanted: str) -> Any:
    with suppress(*CUT_SHORT):
        return client.list_objects_v2(**wanted)
    return client.list_objects_v2(**wanted)
