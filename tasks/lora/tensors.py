"""Tensor data, bit for bit: reading one tensor at a time, and questions about its bits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from tasks.lora.errors import CorruptFile
from tasks.lora.files import AdapterFiles
from tasks.lora.header import TensorEntry

TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# (an integer type of the same width, the bits of the exponent, all bits but the sign)
_BITS = {
    torch.float32: (torch.int32, 0x7F800000, 0x7FFFFFFF),
    torch.float16: (torch.int16, 0x7C00, 0x7FFF),
    torch.bfloat16: (torch.int16, 0x7F80, 0x7FFF),
}


class TensorReader:
    """Reads tensors of an adapter's open weight files, each into memory of its own."""

    def __init__(self, files: AdapterFiles, descriptors: Sequence[int]) -> None:
        """Made by `open_tensors`, which also closes the files. descriptors: in the order of `files.weights`."""
        self._files = files
        self._descriptors = descriptors

    def read_tensor(self, entry: TensorEntry) -> torch.Tensor:
        """Return the tensor with the shape and dtype of its entry. Raises CorruptFile if the file shrank."""
        buffer = bytearray(entry.end - entry.begin)
        self.read_into(entry, memoryview(buffer))
        return torch.frombuffer(buffer, dtype=TORCH_DTYPES[entry.dtype]).view(entry.shape)

    def read_into(self, entry: TensorEntry, buffer: memoryview) -> None:
        """Fill `buffer`, as long as the tensor, with its bytes. Raises CorruptFile if the file shrank."""
        place = entry.begin
        descriptor = self._descriptors[entry.file]
        while buffer:
            count = os.preadv(descriptor, [buffer], place)
            if count == 0:
                raise CorruptFile(
                    self._files.label,
                    entry.name,
                    f"data up to byte {entry.end}",
                    f"the file's end at {place}",
                )
            place += count
            buffer = buffer[count:]


@contextmanager
def open_tensors(files: AdapterFiles) -> Iterator[TensorReader]:
    """Yield a reader of the folder's weight files, closed afterwards."""
    with ExitStack() as stack:
        descriptors = []
        for weights in files.weights:
            descriptors.append(os.open(weights.path, os.O_RDONLY))
            stack.callback(os.close, descriptors[-1])
        yield TensorReader(files, descriptors)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as integers, so that NaN equals itself and -0 differs from 0."""
    return tensor.view(_BITS[tensor.dtype][0])


def take_magnitudes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements' bits without their signs, as integers that order like |x|: NaN on top, ±0 is 0.

    The tensor's own memory is overwritten: big temporaries cost more than all the arithmetic here.
    """
    return bits(tensor).bitwise_and_(_BITS[tensor.dtype][2])


def count_nonfinite(magnitudes: torch.Tensor, dtype: torch.dtype) -> int:
    """Return how many of the magnitudes of a tensor of this dtype are NaN or infinite."""
    exponent = _BITS[dtype][1]
    if int(magnitudes.amax()) < exponent:
        return 0
    return int(torch.count_nonzero(magnitudes >= exponent))
