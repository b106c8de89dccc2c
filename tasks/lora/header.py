"""The header of a safetensors file: parsed strictly, formatted deterministically.

Source: the format's own description (safetensors repository, README "Format"): 8 bytes little-endian header
length, UTF-8 JSON, then one byte buffer that the tensors fill without holes or overlap.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from json.encoder import encode_basestring

from tasks.lora.errors import AdapterError, CorruptFile, EmptyAdapter, UnsupportedDtype
from tasks.lora.strict_json import parse_strict_json

LENGTH_BYTES = 8
# The safetensors library refuses longer headers (MAX_HEADER_SIZE).
MAX_HEADER_BYTES = 100_000_000
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
METADATA_KEY = "__metadata__"
PLAIN_METADATA = {"format": "pt"}
"""What safetensors' own writers put into a header, and readers ask for."""

# Far beyond any adapter; products of longer or larger shapes take Python minutes, and more digits than it prints.
_MOST_DIMENSIONS = 8
_MOST_DIGITS = 40
_LIMIT = 10**_MOST_DIGITS
_MOST_CHARACTERS = 4_096

_DTYPES = ", ".join(ITEM_BYTES)
_ENTRY_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file, under its stored name; begin and end are byte offsets in the file, not in its data.

    file: which of the adapter's weight files it lies in.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    file: int = 0


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a file that is still to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def data_bytes(self) -> int:
        """Bytes of the tensor's elements."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of one dtype and shape that lie side by side in a file that is still to be written."""

    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]

    @property
    def tensors(self) -> list[TensorSpec]:
        """Each of them."""
        return [TensorSpec(name, self.dtype, self.shape) for name in self.names]

    @property
    def data_bytes(self) -> int:
        """Bytes of all their elements."""
        return len(self.names) * math.prod(self.shape) * ITEM_BYTES[self.dtype]


def parse_header(
    header: bytes,
    *,
    file_bytes: int,
    adapter: str,
    where: str,
    file: int = 0,
    metadata: Mapping[str, str] | None = None,
) -> tuple[TensorEntry, ...]:
    """Return the tensors in the order in which they lie in the file.

    header: the JSON part. file_bytes: the size of the whole file. file: its place among the adapter's weight
    files. metadata: what the header must say of the file, where that is asked. Raises CorruptFile for a header that
    does not describe exactly this file, UnsupportedDtype, and EmptyAdapter for no tensors or empty ones.
    """

    with _without_collection():
        return _parse_header(
            header, file_bytes=file_bytes, adapter=adapter, where=where, file=file, wanted=metadata
        )


@contextmanager
def _without_collection() -> Iterator[None]:
    """Keep Python from looking for cycles among a header's parts, which takes longer than parsing them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _parse_header(
    header: bytes, *, file_bytes: int, adapter: str, where: str, file: int, wanted: Mapping[str, str] | None
) -> tuple[TensorEntry, ...]:
    def corrupt(expected: str, found: str) -> AdapterError:
        return CorruptFile(adapter, where, expected, found)

    try:
        fields = parse_strict_json(header)
    except ValueError as error:
        raise corrupt("a header of strict JSON", str(error)) from error
    if not isinstance(fields, dict):
        raise corrupt("a header that is a JSON object", f"a JSON {type(fields).__name__}")
    metadata = fields.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise corrupt(f"text values in {METADATA_KEY}", "something else")
    if wanted is not None and metadata != wanted:
        raise corrupt(f"{METADATA_KEY} {json.dumps(wanted)}", json.dumps(metadata)[:200])
    if not fields:
        raise EmptyAdapter(adapter, where, "at least one tensor", "none")
    start = LENGTH_BYTES + len(header)
    entries = [_parse_entry(name, entry, start, adapter, where, file) for name, entry in fields.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    place = start
    for entry in entries:
        if entry.begin != place:
            kind = "overlaps its neighbour" if entry.begin < place else "leaves a hole before it"
            raise corrupt(
                "tensors that fill the file side by side", f"{entry.name} at {entry.begin}: it {kind}"
            )
        place = entry.end
    if place > file_bytes:
        raise CorruptFile(
            adapter,
            where,
            f"{place} bytes, as its header says",
            f"{file_bytes} bytes",
            "It is cut short: the upload may still be under way, or broke off. Upload it again.",
        )
    if place < file_bytes:
        raise corrupt(f"{place} bytes, as its header says", f"{file_bytes} bytes")
    return tuple(entries)


def _parse_entry(name: str, entry: object, start: int, adapter: str, where: str, file: int) -> TensorEntry:
    def corrupt(expected: str, found: object) -> CorruptFile:
        return CorruptFile(adapter, f"{where}: {name[:200]}", expected, str(found)[:200])

    if len(name) > _MOST_CHARACTERS:
        raise corrupt(f"a name of at most {_MOST_CHARACTERS} characters", f"one of {len(name)}")
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_FIELDS:
        raise corrupt("exactly dtype, shape and data_offsets", entry)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise corrupt("a dtype that is text", dtype)
    if not _is_natural_list(shape) or len(shape) > _MOST_DIMENSIONS:
        raise corrupt(
            f"a shape of at most {_MOST_DIMENSIONS} whole numbers of at most {_MOST_DIGITS} digits", shape
        )
    if not _is_natural_list(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise corrupt("data_offsets [begin, end]", offsets)
    if dtype not in ITEM_BYTES:
        raise UnsupportedDtype(adapter, f"{where}: {name[:200]}", _DTYPES, dtype[:200])
    expected = math.prod(shape) * ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != expected:
        raise corrupt(f"{expected} bytes for {dtype} {shape}", f"{offsets[1] - offsets[0]} bytes")
    if expected == 0:
        raise EmptyAdapter(adapter, f"{where}: {name[:200]}", "a tensor with elements", f"shape {shape}")
    return TensorEntry(name, dtype, tuple(shape), start + offsets[0], start + offsets[1], file)


def _is_natural_list(value: object) -> bool:
    # A plain loop: this is asked twice of each of tens of thousands of tensors.
    if not isinstance(value, list):
        return False
    for item in value:  # noqa: SIM110
        if type(item) is not int or not 0 <= item < _LIMIT:
            return False
    return True


def format_header(groups: Iterable[TensorGroup], metadata: Mapping[str, str] = PLAIN_METADATA) -> bytes:
    """Return the first bytes of a file that holds these tensors in this order: length and JSON.

    metadata: what it says of itself. Padded with spaces so that the data begins at a multiple of 8, as the safetensors
    library does.
    """
    items = [f'"{METADATA_KEY}":{json.dumps(metadata, separators=(",", ":"))}']
    place = 0
    for group in groups:
        # Put together here, as only names and offsets differ among tens of thousands of tensors.
        shape = ",".join(map(str, group.shape))
        front = f':{{"dtype":"{group.dtype}","shape":[{shape}],"data_offsets":['
        size = group.data_bytes // len(group.names)
        for name in group.names:
            items.append(f"{encode_basestring(name)}{front}{place},{place + size}]}}")
            place += size
    text = f"{{{','.join(items)}}}".encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
