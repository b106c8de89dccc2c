"""The matrix of a base: every cell as it was measured, and what all of them together say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from storage.documents import (
    AuthorName,
    BaseName,
    Document,
    RootDocument,
    Sha256,
    UtcTime,
    put_document,
    read_document,
)
from storage.errors import InvalidDocument, ObjectNotFound
from storage.keys import (
    matrix_cell_key,
    matrix_cells_prefix,
    matrix_prefix,
    matrix_samples_key,
    newest_matrix_key,
)
from storage.s3 import S3Store

_READERS = 16

Identity = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class MatrixCell(RootDocument):
    """One adapter, or the base, on one text: bits for each unit in the text's order, null where the unit is void.

    `text`: the digest of the held-out set's bytes. `output_digest`: null for the base. `tokens`: sent to the engine.
    """

    base: BaseName
    engine_id: Identity
    measure_id: Identity
    text: Sha256
    output_digest: Sha256 | None
    units: tuple[str, ...]
    unit_bytes: tuple[int, ...]
    bits: tuple[float | None, ...]
    tokens: int
    seconds: float
    measured_at: UtcTime


class MatrixSample(Document):
    """What an adapter wrote after a prompt: token ids of both, and the UTF-8 bytes of what it wrote."""

    unit: str
    seed: int
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    bytes: int


class MatrixSamples(RootDocument):
    """What one adapter wrote after prompts of its own texts, once for each seed."""

    base: BaseName
    engine_id: Identity
    output_digest: Sha256
    max_tokens: int
    temperature: float
    samples: tuple[MatrixSample, ...]
    sampled_at: UtcTime


class MatrixShare(Document):
    """How many of so many were attributed right, with Wilson's 95 % interval, null where there were none."""

    right: int
    total: int
    share: float | None
    interval: tuple[float, float] | None


class MatrixAdapter(Document):
    """An adapter of the matrix, as it was served then."""

    author: AuthorName
    output_digest: Sha256


class MatrixText(Document):
    """A text of the matrix: the held-out set `ref`, and the authors whose own text it is.

    Units and bytes are those that all could score. `bpb`: bits per byte by author, of those scored on it. `right`: its
    units that were attributed right, null where it could not be attributed.
    """

    ref: str
    text: Sha256
    owners: tuple[AuthorName, ...]
    units: int
    bytes: int
    base_bpb: float | None
    bpb: dict[AuthorName, float | None]
    right: MatrixShare | None


class MatrixPair(Document):
    """An author's adapter and another's on the former's text; `taken` of the units fit the other better, or as well."""

    ref: str
    owner: AuthorName
    other: AuthorName
    margin: float
    taken: int
    units: int


class MatrixLeftOut(Document):
    """An adapter or a text that is not in the matrix, and why."""

    what: str
    why: str


class MatrixGenerated(Document):
    """The attribution of what the adapters wrote themselves; `per_author`: each author's samples.

    Each of `prompts` prompts per adapter was continued once per seed by at most `max_tokens` tokens.
    """

    seeds: int
    prompts: int
    max_tokens: int
    temperature: float
    right: MatrixShare
    per_author: dict[AuthorName, MatrixShare]


@dataclass(frozen=True, slots=True)
class KnownMargin:
    """Another adapter on an author's own text `ref`: bits per byte more than the author's own adapter takes."""

    author: str
    output_digest: str
    ref: str
    margin: float


class MatrixDocument(RootDocument):
    """What a matrix says: `matrices/<base>/<space>/<matrix id>.json`, the picture beside it as .svg.

    `space`: all that cells must share to be compared. `sample`: others scored on each text, null for all of them.
    `whole`: the base's whole roster. `misattributed`: texts that another adapter fits better than, or as well as, each
    owner's. `pairs`: the most confusable ones. `choices`: the mean number of adapters that a text was attributed among.
    """

    base: BaseName
    space: Identity
    matrix_id: Identity
    engine_id: Identity
    sample: int | None
    whole: bool
    adapters: tuple[MatrixAdapter, ...]
    texts: tuple[MatrixText, ...]
    sets: MatrixShare
    units: MatrixShare
    misattributed: tuple[str, ...]
    choices: float | None
    pairs: tuple[MatrixPair, ...]
    generated: MatrixGenerated | None
    left_out: tuple[MatrixLeftOut, ...]
    cells: int
    tokens: int
    seconds: float
    measured_at: UtcTime
    tool_version: str

    def list_margins(self, author: str) -> tuple[KnownMargin, ...]:
        """Return every other adapter that was scored on an author's own texts, the hardest first.

        The margin is the smallest one over those texts. Who is nobody's wrong adapter is not left out here.
        """
        digests = {adapter.author: adapter.output_digest for adapter in self.adapters}
        known: dict[str, KnownMargin] = {}
        for text in self.texts:
            own = text.bpb.get(author)
            if author not in text.owners or own is None:
                continue
            for other, bpb in text.bpb.items():
                if other == author or bpb is None:
                    continue
                found = KnownMargin(other, digests[other], text.ref, bpb - own)
                if other not in known or found.margin < known[other].margin:
                    known[other] = found
        return tuple(sorted(known.values(), key=lambda one: (one.margin, one.author)))


def write_cell(store: S3Store, space: str, cell: MatrixCell) -> str:
    """Write a cell over an earlier one, and return its key.

    Raises InvalidName, InvalidDocument, StoreUnavailable.
    """
    key = matrix_cell_key(cell.base, space, cell.text, cell.output_digest)
    put_document(store, key, cell)
    return key


def list_cells(store: S3Store, base: str, space: str) -> frozenset[str]:
    """Return the keys of all cells that were measured in this space.

    Raises InvalidName, StoreUnavailable, StoreNotTrusted.
    """
    return frozenset(found.key for found in store.list_objects(matrix_cells_prefix(base, space)))


def read_cells(store: S3Store, keys: Iterable[str]) -> Mapping[str, MatrixCell]:
    """Return the cells of these keys; one that is gone, or that is no cell of ours, is left out.

    Raises StoreUnavailable.
    """

    def read(key: str) -> tuple[str, MatrixCell] | None:
        try:
            return key, read_document(store, key, MatrixCell)[0]
        except (ObjectNotFound, InvalidDocument):
            return None

    with ThreadPoolExecutor(_READERS) as readers:
        return dict(found for found in readers.map(read, sorted(set(keys))) if found is not None)


def write_samples(store: S3Store, space: str, samples: str, document: MatrixSamples) -> None:
    """Write what an adapter wrote; `samples` is the digest of all that decides it.

    Raises InvalidName, InvalidDocument, StoreUnavailable.
    """
    put_document(store, matrix_samples_key(document.base, space, samples), document)


def read_samples(store: S3Store, base: str, space: str, samples: str) -> MatrixSamples | None:
    """Return what an adapter wrote, None where it has not been asked yet.

    Raises InvalidName, InvalidDocument, StoreUnavailable.
    """
    try:
        return read_document(store, matrix_samples_key(base, space, samples), MatrixSamples)[0]
    except ObjectNotFound:
        return None


def write_matrix(store: S3Store, matrix: MatrixDocument, picture: str) -> str:
    """Write a matrix and its picture, and return the matrix's key; one of the whole roster becomes the newest.

    A sample does only where the newest is no whole matrix of the same space, which knows more.

    Raises InvalidName, InvalidDocument, StoreUnavailable.
    """
    prefix = matrix_prefix(matrix.base, matrix.space) + matrix.matrix_id
    store.put(f"{prefix}.svg", picture.encode())
    put_document(store, f"{prefix}.json", matrix)
    if matrix.whole and (matrix.sample is None or not _is_whole(store, matrix.base, matrix.space)):
        put_document(store, newest_matrix_key(matrix.base), matrix)
    return f"{prefix}.json"


def _is_whole(store: S3Store, base: str, space: str) -> bool:
    """Tell whether the newest matrix is one of this space, and no sample."""
    try:
        newest = read_newest_matrix(store, base)
    except InvalidDocument:
        return False
    return newest is not None and newest.space == space and newest.sample is None


def read_newest_matrix(store: S3Store, base: str) -> MatrixDocument | None:
    """Return the newest matrix of a base's whole roster, None where there is none.

    Raises InvalidName, InvalidDocument, StoreUnavailable.
    """
    try:
        return read_document(store, newest_matrix_key(base), MatrixDocument)[0]
    except ObjectNotFound:
        return None
