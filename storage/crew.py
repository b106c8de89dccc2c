"""Pieces of one transfer, done by several threads at once and handed on in their order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Generic, Self, TypeVar

_Piece = TypeVar("_Piece")
_Result = TypeVar("_Result")


class Crew(Generic[_Piece, _Result]):
    """Threads that do `work` on every piece. They are at work while this is entered as a context manager.

    Whoever leaves it early, by an error or Ctrl-C, waits for none of them: each ends with the piece that it has, and
    none keeps the interpreter from ending. So `work` must hold whatever it needs by itself: a descriptor of the
    caller's may be another file's by then.
    """

    def __init__(self, work: Callable[[_Piece], _Result], pieces: Sequence[_Piece], threads: int) -> None:
        self._stopped = threading.Event()
        self._work, self._count = work, len(pieces)
        self._left: Iterator[tuple[int, _Piece]] = iter(enumerate(pieces))
        self._lock = threading.Lock()
        self._done: SimpleQueue[tuple[int, _Result | None, BaseException | None]] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name="transfer", daemon=True)
            for _ in range(min(threads, len(pieces)))
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()

    def results(self) -> Iterator[_Result]:
        """Yield what was made of each piece, in the order of the pieces, each as soon as it and all before it are done.

        Raises whatever the first piece that failed raised, as soon as it did.
        """
        early: dict[int, _Result] = {}
        following = 0
        while following < self._count:
            number, result, error = self._done.get()
            if error is not None:
                raise error
            early[number] = result  # type: ignore[assignment]  # None only where there is an error, or it is the result
            while following in early:
                yield early.pop(following)
                following += 1

    def join(self) -> None:
        """Have no more pieces begun, and wait for those that are at work."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            with self._lock:
                number, piece = next(self._left, (-1, None))
            if piece is None:
                return
            try:
                self._done.put((number, self._work(piece), None))
            except BaseException as error:  # noqa: BLE001  # it is raised where the results are taken
                self._done.put((number, None, error))
                return
