"""The names by which vLLM knows adapters: `<author>@<first 16 of the output digest>`, `<author>~control@…`.

A name belongs to one adapter's bytes for ever, since vLLM must never see new bytes under an old name.
"""

import re
from dataclasses import dataclass

from storage.keys import control_prefix, serving_prefix

_NAME = re.compile(r"([a-z0-9][a-z0-9._-]{0,63})(~control)?@([0-9a-f]{16})")
_SHORT = 16


@dataclass(frozen=True, slots=True)
class Version:
    """One adapter of one author, or its control: the same adapter, read wrongly on purpose to be scored.

    digest: the first 16 characters of its output digest.
    """

    author: str
    digest: str
    control: bool = False

    @property
    def name(self) -> str:
        """The name by which vLLM knows it."""
        return f"{self.author}{'~control' if self.control else ''}@{self.digest}"

    def prefix(self, output_digest: str) -> str:
        """The prefix in the store under which it lies; `output_digest` is the whole digest.

        Raises storage's InvalidName.
        """
        return (control_prefix if self.control else serving_prefix)(self.author, output_digest)

    @property
    def folder(self) -> str:
        """The prefix in the store under which all the author's adapters of this kind lie."""
        return f"{'control' if self.control else 'serving'}/{self.author}/"


def roster_version(author: str, output_digest: str) -> Version:
    """The version of an author that has this output digest."""
    return Version(author, output_digest[:_SHORT])


def parse_version(name: str) -> Version | None:
    """The version that a name means; None for any other name. The inverse of `Version.name`."""
    match = _NAME.fullmatch(name)
    return None if match is None else Version(match[1], match[3], control=match[2] is not None)
