"""How boto3's client is made: its patience, its checksums, and how it reads answers."""

from __future__ import annotations

from typing import Any

from boto3.session import Session
from botocore.config import Config
from botocore.loaders import create_loader
from botocore.session import get_session

from storage.answers import check_whole, parse_time

_CONNECT_SECONDS = 5
_READ_SECONDS = 60
_ATTEMPTS = 5
_HURRIED_CONNECT_SECONDS, _HURRIED_READ_SECONDS, _HURRIED_ATTEMPTS = 2, 10, 2
_CONNECTIONS = 32
# What botocore knows of S3, 50 ms to read, is read once a process; runs that fork off one have it.
_LOADER = create_loader()


def make_client(
    endpoint: str | None,
    region: str,
    access_key: str | None,
    secret_key: str | None,
    *,
    addressing_style: str,
    hurried: bool,
) -> tuple[Session, Any]:
    """Return a session and its client for S3; nothing is asked of the store yet.

    For a custom endpoint checksums are sent only where the protocol asks for them, since many stores refuse the headers
    that boto3 adds. hurried: give up within seconds. Source: boto/boto3 issue 4392.
    """
    checksums = "when_required" if endpoint is not None else "when_supported"
    config = Config(
        connect_timeout=_HURRIED_CONNECT_SECONDS if hurried else _CONNECT_SECONDS,
        read_timeout=_HURRIED_READ_SECONDS if hurried else _READ_SECONDS,
        max_pool_connections=_CONNECTIONS,
        retries={"mode": "standard", "total_max_attempts": _HURRIED_ATTEMPTS if hurried else _ATTEMPTS},
        request_checksum_calculation=checksums,
        response_checksum_validation=checksums,
        s3={"addressing_style": addressing_style},
    )
    core = get_session()
    core.register_component("data_loader", _LOADER)
    core.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=parse_time)
    session = Session(access_key, secret_key, region_name=region, botocore_session=core)
    client = session.client("s3", endpoint_url=endpoint, config=config)
    client.meta.events.register("before-parse.s3", check_whole)
    return session, client
