"""Where the numbers of a tensor stand in flat memory: shapes and strides, as plain integers."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class View:
    """Element (i, j, …) of `shape` stands at offset + i * strides[0] + j * strides[1] + …, counted in elements."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def narrow(self, axis: int, begin: int, end: int) -> View:
        """Return the part from `begin` up to `end` along one axis."""
        shape = (*self.shape[:axis], end - begin, *self.shape[axis + 1 :])
        return View(self.offset + begin * self.strides[axis], shape, self.strides)

    def share(self, axis: int, place: int, count: int, *, interleaved: bool) -> View:
        """Return one of `count` equal shares of an axis, which lie one after the other or take turns."""
        size = self.shape[axis] // count
        if not interleaved:
            return self.narrow(axis, place * size, (place + 1) * size)
        shape = (*self.shape[:axis], size, *self.shape[axis + 1 :])
        strides = (*self.strides[:axis], count * self.strides[axis], *self.strides[axis + 1 :])
        return View(self.offset + place * self.strides[axis], shape, strides)

    def permute(self, *axes: int) -> View:
        """Return the same elements with the axes in another order."""
        return View(
            self.offset, tuple(self.shape[axis] for axis in axes), tuple(self.strides[axis] for axis in axes)
        )

    def merged(self) -> View:
        """Return the same elements in the same order with as few axes as will do."""
        shape: list[int] = []
        strides: list[int] = []
        for size, stride in zip(self.shape, self.strides, strict=True):
            if size == 1:
                continue
            if shape and strides[-1] == size * stride:
                shape[-1] *= size
                strides[-1] = stride
            else:
                shape.append(size)
                strides.append(stride)
        return View(self.offset, tuple(shape), tuple(strides))


def whole(*shape: int) -> View:
    """Return the view of row-major memory that holds nothing but `shape`."""
    return View(0, shape, tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape))))
