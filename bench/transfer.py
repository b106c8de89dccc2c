"""Moving an adapter between this machine and a store, beside one plain boto3 stream each way, and beside `cp`.

A real SeaweedFS runs on this machine, so it takes from the same cores and the same disk: read the ratios, which are
medians of ratios within a turn. A download ends with the file written and its sha256 known, plain or not.

`sequence_s`: upload, then download of what was uploaded, as a worker and then another one do. `resumed_s`: an upload
of which the store has half of the parts already, as after a kill.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.machine import describe_machine
from bench.tiny_world import kept_with_tests
from storage.s3 import S3Store

HELP = "up- and download of a large file, beside one plain boto3 stream each way and cp"
RESULT = Path(__file__).resolve().parent / "results" / "transfer.json"
KEY = "serving/ash/digest/adapter_model.safetensors"
_PIECE = 1 << 20
_TIMED = ("cp_s", "plain_upload_s", "upload_s", "resumed_s", "plain_download_s", "download_s")


def run(arguments: list[str]) -> dict[str, Any]:
    """Return the figures: medians in seconds, and ratios to the plain stream and to cp."""
    parser = argparse.ArgumentParser(prog="./run bench transfer", description=HELP)
    parser.add_argument("--turns", type=int, default=5, help="how often everything is measured")
    parser.add_argument(
        "--megabytes", type=int, default=1700, help="size of the file (30B-A3B, rank 16: 1700)"
    )
    parser.add_argument(
        "--folder", type=Path, help="where to write (six times the file); a temporary one if left out"
    )
    parser.add_argument(
        "--save", action="store_true", help=f"put the figures into bench/results/{RESULT.name}"
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-transfer-") as scratch:
        figures = _measure(Path(scratch), options.megabytes, options.turns)
    if options.save:
        RESULT.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


def show(figures: dict[str, Any]) -> None:
    """Print the figures as a table."""
    table = Table(
        "", "seconds", "to the plain stream", "to cp", title="median of the turns", title_justify="left"
    )
    for name in _TIMED:
        told = [figures.get(f"ratio_{name.removesuffix('_s')}{of}") for of in ("", "_to_cp")]
        table.add_row(
            name.removesuffix("_s"), str(figures[name]), *("" if one is None else str(one) for one in told)
        )
    Console(highlight=False).print(table)


def _measure(scratch: Path, megabytes: int, turns: int) -> dict[str, Any]:
    source = scratch / "source"
    sha256 = _write(source, megabytes)
    (scratch / "store").mkdir()
    seconds: dict[str, list[float]] = {name: [] for name in _TIMED}
    with kept_with_tests("store_builders").start_seaweedfs(scratch / "store") as server:
        store: S3Store = server.open("transfer")
        for turn in range(turns):
            print(f"turn {turn + 1} of {turns} …", file=sys.stderr)
            for name, took in _measure_turn(store, source, sha256).items():
                seconds[name].append(took)
    figures: dict[str, Any] = {name: round(statistics.median(took), 2) for name, took in seconds.items()}
    sequence = [up + down for up, down in zip(seconds["upload_s"], seconds["download_s"], strict=True)]
    plain = [
        up + down for up, down in zip(seconds["plain_upload_s"], seconds["plain_download_s"], strict=True)
    ]
    seconds |= {"sequence_s": sequence, "plain_sequence_s": plain}
    figures["sequence_s"] = round(statistics.median(sequence), 2)
    return figures | {
        **{
            f"ratio_{name}": _ratio(seconds, f"{name}_s", f"plain_{name}_s")
            for name in ("upload", "download", "sequence")
        },
        **{f"ratio_{name}_to_cp": _ratio(seconds, f"{name}_s", "cp_s") for name in ("upload", "download")},
        "ratio_resumed": _ratio(seconds, "resumed_s", "upload_s"),
        "megabytes": megabytes,
        "turns": turns,
        "machine": describe_machine(),
    }


def _ratio(seconds: dict[str, list[float]], one: str, other: str) -> float:
    pairs = zip(seconds[one], seconds[other], strict=True)
    return round(statistics.median(took / beside for took, beside in pairs), 3)


def _measure_turn(store: S3Store, source: Path, sha256: str) -> dict[str, float]:
    target = source.with_name("target")
    client, bucket = store._client, store.bucket

    def plain_upload() -> None:
        with source.open("rb") as file:
            client.put_object(Bucket=bucket, Key="plain", Body=file)

    def plain_download() -> None:
        digest = hashlib.sha256()
        with target.open("wb") as file:
            for piece in client.get_object(Bucket=bucket, Key="plain")["Body"].iter_chunks(_PIECE):
                file.write(piece)
                digest.update(piece)
        _require(digest.hexdigest() == sha256)

    def download() -> None:
        info = store.head(KEY)
        _require(info is not None and store.download_file(KEY, target, if_match=info.etag).sha256 == sha256)

    def begin_half() -> None:
        begun = 0

        def is_stopped() -> bool:
            nonlocal begun
            begun += 1
            return begun * 2 * (16 << 20) >= source.stat().st_size

        _require(store.send_parts(source, KEY, sha256=sha256, is_stopped=is_stopped) is None)

    upload = lambda: store.upload_file(source, KEY, sha256=sha256)  # noqa: E731
    took = {"cp_s": _timed(lambda: subprocess.run(["cp", "--reflink=never", source, target], check=True))}
    for name, work in (("plain_upload_s", plain_upload), ("upload_s", upload)):
        took[name] = _timed(work)
    for name, work in (("plain_download_s", plain_download), ("download_s", download)):
        target.unlink()
        took[name] = _timed(work)
    store.delete(KEY)
    begin_half()
    took["resumed_s"] = _timed(upload)
    for key in (KEY, "plain"):
        store.delete(key)
    return took


def _timed(work: Callable[[], object]) -> float:
    os.sync()  # what was written before is not written now
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _write(path: Path, megabytes: int) -> str:
    """Random bytes, which nothing on the way can make shorter; returns their sha256."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for _ in range(megabytes):
            piece = os.urandom(1_000_000)
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()


def _require(held: bool) -> None:
    if not held:
        raise RuntimeError("what came is not what was sent")
