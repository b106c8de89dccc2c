"""The report of the whole roster: from the catalog, with each base's newest matrix from the store, to one file."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from roster.reader import CatalogReader
from roster.report import Report, render_report
from roster.report_details import pack_details
from roster.report_index import list_names, read_index
from roster.report_names import Names
from roster.report_rows import ReportMatrix, ReportText
from storage.documents import format_time
from storage.errors import InvalidDocument, StoreNotTrusted, StoreUnavailable, UnknownBase
from storage.matrices import MatrixDocument, read_newest_matrix
from storage.s3 import S3Store
from tasks.matrix_report import say_share


@dataclass(frozen=True, slots=True)
class Written:
    """A report as it was written. left_out: what it lacks, and why."""

    path: Path
    bytes: int
    synced_at: str
    authors: int
    served: int
    matrices: int
    left_out: tuple[str, ...]


def write_report(
    reader: CatalogReader,
    out: Path,
    *,
    store: S3Store | None,
    base: str | None = None,
    anonymous: bool = False,
) -> Written:
    """Write the page of one base or of all to `out`, whole or not at all.

    store: where the matrices are; None, or one that does not answer: the page says that it has none.

    Raises UnknownBase, CatalogDamaged, OSError.
    """
    known = [row.base for row in reader.bases()]
    if base is not None and base not in known and not any(row.base == base for row in reader.authors()):
        raise UnknownBase(base, known)
    names = list_names(reader, base, anonymous=anonymous)
    index = read_index(reader, base, names)
    left_out: list[str] = []
    matrices = tuple(_matrices(store, known if base is None else [base], names, left_out))
    report = Report(index, matrices, tuple(left_out), base, anonymous, metadata.version("adapter-roster"))
    page = render_report(report, pack_details(reader, base, index.order, names)).encode()
    _put(out, page)
    return Written(
        out,
        len(page),
        index.synced_at,
        len(index.authors),
        sum(row.standing == "served" for row in index.authors),
        len(matrices),
        tuple(left_out),
    )


def _matrices(
    store: S3Store | None, bases: Iterable[str], names: Names, left_out: list[str]
) -> Iterator[ReportMatrix]:
    if store is None:
        left_out.append("The matrices are not here: no object store is set.")
        return
    for base in bases:
        try:
            matrix = read_newest_matrix(store, base)
        except (StoreUnavailable, StoreNotTrusted):
            left_out.append("The matrices are not here: the object store did not answer.")
            return
        except InvalidDocument as error:
            left_out.append(f"The matrix of {base} is not here: {_why(error, names)}")
            continue
        if matrix is not None:
            yield _named(matrix, names)


def _why(error: InvalidDocument, names: Names) -> str:
    return "it is no document of ours." if names.anonymous else str(error)


def _named(matrix: MatrixDocument, names: Names) -> ReportMatrix:
    """A matrix as the page shows it, in the order of the names there."""
    texts = [
        ReportText(
            names.text(text.ref, number),
            tuple(names.name(owner) for owner in text.owners),
            text.base_bpb,
            tuple((names.name(author), bpb) for author, bpb in text.bpb.items()),
        )
        for number, text in enumerate(matrix.texts, start=1)
    ]
    fits = len(matrix.misattributed)
    wrong = f"Another adapter fits as well or better on {fits} of {len(texts)} texts."
    return ReportMatrix(
        matrix.base,
        format_time(matrix.measured_at),
        matrix.engine_id,
        tuple(sorted(names.name(adapter.author) for adapter in matrix.adapters)),
        tuple(sorted(texts, key=lambda text: (text.owners, text.ref))),
        (
            f"Held-out sets attributed to their author: {say_share(matrix.sets)}.",
            f"Single units: {say_share(matrix.units)}.",
            *((wrong,) if fits else ()),
            *((f"Each text was scored by {matrix.sample} others only.",) if matrix.sample else ()),
        ),
    )


def _put(out: Path, page: bytes) -> None:
    """Put the page in its place in one move."""
    fresh = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    try:
        fresh.write_bytes(page)
        fresh.replace(out)
    finally:
        fresh.unlink(missing_ok=True)
