"""A look at every number of an adapter before conversion: is it finite, and what does it show?

Each tensor is read once; all that stays of it is one bit for each component, and its score.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tasks.lora.correlation import PooledScore, TensorScore, pool_scores, score_tensor
from tasks.lora.decide import ONLY_ZEROS, RANK_1, PackedTensor
from tasks.lora.errors import NonFinite
from tasks.lora.family import TensorClass
from tasks.lora.files import AdapterFiles
from tasks.lora.header import TensorEntry
from tasks.lora.layouts import Orientation
from tasks.lora.rearrange import one_thread
from tasks.lora.sources import AdapterLayout, ExpertPair, SourceForm
from tasks.lora.tensors import TORCH_DTYPES, TensorReader, open_tensors

Flags = npt.NDArray[np.bool_]
_Words = npt.NDArray[Any]

# (an unsigned integer type of the same width, all bits but the sign, the bits of the exponent)
_BITS = {"F32": ("u4", 0x7FFFFFFF, 0x7F800000), "F16": ("u2", 0x7FFF, 0x7C00), "BF16": ("u2", 0x7FFF, 0x7F80)}
# Elements taken at a time: their magnitudes then stay in the processor's cache.
_BLOCK = 1 << 17
# Pairs looked at at a time.
_THREADS = 2
# Tensors named beside the first that has NaN or infinite values.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class _Fault:
    """A tensor with so many NaN or infinite values."""

    name: str
    count: int
    elements: int


@dataclass(frozen=True, slots=True)
class PairSurvey:
    """What is left of one expert pair.

    a, b: of the stored lora_A and lora_B, (shares, components): whether a component holds anything but zeros. The
    factor that has the delta's output rows has one share for each projection, the other has one share. Components
    are those of the stacked axis in stored order, else one for each expert. score: None where there was none.
    """

    pair: ExpertPair
    a: Flags
    b: Flags
    score: TensorScore | None


@dataclass(frozen=True, slots=True)
class Survey:
    """What the numbers of an adapter show by themselves. modules: whether each pair of other modules moved."""

    pairs: tuple[PairSurvey, ...]
    modules: tuple[tuple[TensorClass, bool], ...]

    def list_tensors(self, parameter: str) -> tuple[PackedTensor, ...]:
        """Return the stored lora_B of each layer of a stacked parameter, with what it says of its packing."""
        own = (item for item in self.pairs if item.pair.parameter == parameter)
        return tuple(
            PackedTensor(item.pair.layer, item.pair.b[0].name, _same_reason(item), item.score) for item in own
        )

    def pool(self, parameter: str) -> PooledScore:
        """Return what all tensors of a stacked parameter say of its packing together."""
        scores = (item.score for item in self.pairs if item.pair.parameter == parameter)
        return pool_scores([score for score in scores if score is not None])


def survey_tensors(files: AdapterFiles, layout: AdapterLayout) -> Survey:
    """Return what every tensor shows, each read once, two at a time; the layout's packing is not asked.

    Raises NonFinite for the first tensor with NaN or infinite values, which counts the others and names some,
    CorruptFile if a file shrank.
    """
    faults: list[_Fault] = []

    def survey_pair(pair: ExpertPair) -> PairSurvey:
        return _survey_pair(reader, layout, pair, faults)

    def is_moved(entry: TensorEntry) -> bool:
        return bool(_read_flags(reader, entry, faults)[0].any())

    with open_tensors(files) as reader, one_thread(), ThreadPoolExecutor(_THREADS) as threads:
        pairs = tuple(threads.map(survey_pair, layout.pairs))
        moved = tuple(threads.map(is_moved, (module.entry for module in layout.modules)))
    if faults:
        raise _explain_faults(layout, faults)
    kinds = (module.key.kind for module in layout.modules[::2])
    both = (first and second for first, second in zip(moved[::2], moved[1::2], strict=True))
    return Survey(pairs, tuple(zip(kinds, both, strict=True)))


def _same_reason(item: PairSurvey) -> str | None:
    if item.pair.rank == 1:
        return RANK_1
    return None if item.a.any() and item.b.any() else ONLY_ZEROS


def _explain_faults(layout: AdapterLayout, faults: list[_Fault]) -> NonFinite:
    """Return the error for the first of them in the order of the pairs and modules."""
    entries = [entry for pair in layout.pairs for entry in (*pair.a, *pair.b)]
    places = {
        entry.name: place
        for place, entry in enumerate([*entries, *(module.entry for module in layout.modules)])
    }
    first, *others = sorted(faults, key=lambda fault: places[fault.name])
    found = f"{first.count} NaN or infinite of {first.elements}"
    if others:
        named = ", ".join(fault.name for fault in others[:_NAMED])
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        found += f"; some too in {named}{more}"
    return NonFinite(layout.label, first.name, "finite values", found)


def _survey_pair(
    reader: TensorReader, layout: AdapterLayout, pair: ExpertPair, faults: list[_Fault]
) -> PairSurvey:
    if layout.form is SourceForm.PER_EXPERT:
        flags = [
            [_read_flags(reader, entry, faults)[0].any() for entry in entries] for entries in (pair.a, pair.b)
        ]
        return PairSurvey(pair, np.array([flags[0]]), np.array([flags[1]]), None)
    if layout.form is SourceForm.CUBE:  # whose first axis may be 1, a factor that all experts share
        (a, _), (b, _) = (_read_flags(reader, entry, faults) for entry in (*pair.a, *pair.b))
        whole = (1, layout.base.experts)
        return PairSurvey(pair, np.broadcast_to(a, whole), np.broadcast_to(b, whole), None)
    shares = len(pair.projections)
    cut = (1, shares) if layout.orientation is Orientation.STANDARD else (shares, 1)
    turns = layout.family.parameter_of(pair.projections[0]).interleaved
    a, a_words = _read_flags(reader, pair.a[0], faults, shares=cut[0], turns=turns)
    b, b_words = _read_flags(reader, pair.b[0], faults, shares=cut[1], turns=turns, columns=True)
    made = PairSurvey(pair, a, b, None)
    if _same_reason(made) is not None or faults:
        return made
    score = score_tensor(
        _as_tensor(a_words, pair.a[0]),
        _as_tensor(b_words, pair.b[0]),
        layer=pair.layer,
        parameter=pair.parameter,
        experts=layout.base.experts,
        rank=pair.rank,
    )
    return PairSurvey(pair, a, b, score)


def _read_flags(
    reader: TensorReader,
    entry: TensorEntry,
    faults: list[_Fault],
    *,
    shares: int = 1,
    turns: bool = False,
    columns: bool = False,
) -> tuple[Flags, _Words]:
    """Return (shares, rows or columns): which hold anything but zeros in a share of the other axis; and the bits.

    turns: the shares take turns along that axis. Axes after the first count as one. A tensor with NaN or infinite
    values is added to `faults`.
    """
    kind, unsigned, exponent = _BITS[entry.dtype]
    words = np.empty(entry.shape, kind)
    reader.read_into(entry, words.reshape(-1).view(np.uint8).data)
    table = words.reshape(len(words), -1)
    if turns:
        parts = [table[place::shares] if columns else table[:, place::shares] for place in range(shares)]
    else:
        parts = np.array_split(table, shares, axis=0 if columns else 1)
    maxima = np.stack([_find_maxima(part, unsigned, columns=columns) for part in parts])
    if maxima.max() >= exponent:
        count = int(np.count_nonzero((words & unsigned) >= exponent))
        faults.append(_Fault(entry.name, count, words.size))
    return maxima != 0, words


def _find_maxima(words: _Words, unsigned: int, *, columns: bool) -> _Words:
    """Return the largest magnitude of each row or column, as bits: they order like |x|, with NaN on top."""
    step = max(1, _BLOCK // words.shape[1])
    blocks = ((words[row : row + step] & unsigned) for row in range(0, len(words), step))
    maxima = [block.max(axis=0 if columns else 1) for block in blocks]
    return np.maximum.reduce(maxima) if columns else np.concatenate(maxima)


def _as_tensor(words: _Words, entry: TensorEntry) -> torch.Tensor:
    return torch.from_numpy(words).view(TORCH_DTYPES[entry.dtype])
