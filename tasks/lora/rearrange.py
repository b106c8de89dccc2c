"""Moving numbers from one order in memory to another, at about the speed of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tasks.lora.views import View


def rearrange(source: torch.Tensor, view: View, out: torch.Tensor, scratch: torch.Tensor) -> None:
    """Fill `out` with the view's elements in row-major order.

    source, out, scratch: flat, of one dtype, apart in memory; out and scratch as long as the view.
    """
    view = view.merged()
    if len(view.shape) == 3:
        first, second, third = view.shape
        if view.strides == (1, first, first * second):
            # Neighbours in memory go farthest apart. Four times faster in two steps, as torch transposes a
            # whole matrix in tiles: measured with torch 2.13 on 128 experts of rank 16.
            matrix = source.as_strided((first, third * second), (1, first), view.offset)
            scratch.view(matrix.shape).copy_(matrix)
            source, view = scratch, View(0, view.shape, (third * second, 1, second))
        elif view.strides[0] == 1 and view.strides[2] == first and view.strides[1] > first * third:
            # Rows of a matrix that is to be transposed, but not its neighbours: gate and up that take turns. Twice as
            # fast with the rows put side by side first: measured as above.
            rows = source.as_strided((second, first * third), (view.strides[1], 1), view.offset)
            scratch.view(rows.shape).copy_(rows)
            source, view = scratch, View(0, (first, second * third), (1, first))
    out.view(view.shape).copy_(source.as_strided(view.shape, view.strides, view.offset))


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch do each operation in the thread that asks for it, this one or one started meanwhile.

    Other threads hash, write or compute beside it; on two busy cores, waiting for a second thread of torch's own made
    copies of 8 MB ten times slower.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
