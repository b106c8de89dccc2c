"""What authors are called on a report's page: by their names, or by numbers that tell nothing."""

import random
from collections.abc import Iterable


class Names:
    """Names of authors on a page. Numbers are drawn anew for each page, so that neither order nor hash tells a name."""

    def __init__(self, authors: Iterable[str], *, anonymous: bool) -> None:
        self.anonymous = anonymous
        known = sorted(set(authors))
        random.SystemRandom().shuffle(known)
        self._width = len(str(len(known)))
        self._numbers = {author: number for number, author in enumerate(known, start=1)}

    def name(self, author: str) -> str:
        """Return what this author is called; one that was not known before gets the next number."""
        if not self.anonymous:
            return author
        number = self._numbers.setdefault(author, len(self._numbers) + 1)
        return f"author-{number:0{self._width}}"

    def text(self, ref: str, number: int) -> str:
        """Return what the held-out text `<author>/<name>` is called; `number` stands for its own name."""
        author, _, _ = ref.partition("/")
        return f"{self.name(author)}/{number}" if self.anonymous else ref
