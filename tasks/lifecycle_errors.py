"""What can go wrong when an operator pins, purges, backs up or restores."""

from __future__ import annotations

from collections.abc import Sequence

from tasks.errors import PipelineError


class AdapterNotNamed(PipelineError):
    """No adapter of an author, or more than one, has a digest that begins so."""

    def __init__(self, author: str, digest: str, found: Sequence[str]) -> None:
        super().__init__(author, digest, tuple(found))
        self.author, self.digest, self.found = author, digest, tuple(found)

    def __str__(self) -> str:
        found = ", ".join(one[:16] for one in self.found[:10]) or "none"
        return (
            f"{self.author}: expected one adapter whose digest begins with {self.digest}, found {found}. "
            f"`roster history {self.author}` tells all of them; name at least 8 digits of one."
        )


class PinRefused(PipelineError):
    """An adapter cannot be pinned, since its verdict is not ready."""

    def __init__(self, author: str, digest: str, state: str) -> None:
        super().__init__(author, digest, state)
        self.author, self.digest, self.state = author, digest, state

    def __str__(self) -> str:
        return (
            f"{self.author}, adapter {self.digest[:16]}: expected a ready verdict, found {self.state}. Nobody would be "
            f"served under this pin. `roster why {self.author}` says what the adapter lacks."
        )


class RosterNamesAuthor(PipelineError):
    """The published roster still names an author whose adapters are to be removed."""

    def __init__(self, author: str, bases: Sequence[str]) -> None:
        super().__init__(author, tuple(bases))
        self.author, self.bases = author, tuple(bases)

    def __str__(self) -> str:
        return (
            f"{self.author}: expected a roster without this author, found it on {', '.join(self.bases)} in "
            f"roster/current.json. No adapter was removed. Run `roster sync`, then `roster purge {self.author}` again."
        )


class BackupRefused(PipelineError):
    """A folder cannot take a backup, or holds none that can be restored."""

    def __init__(self, folder: str, expected: str, found: str, advice: str) -> None:
        super().__init__(folder, expected, found, advice)
        self.folder, self.expected, self.found, self.advice = folder, expected, found, advice

    def __str__(self) -> str:
        return f"{self.folder}: expected {self.expected}, found {self.found}. {self.advice}"


class BackupDamaged(PipelineError):
    """A file of a backup holds other bytes than its list says, or is gone."""

    def __init__(self, folder: str, key: str, expected: str, found: str) -> None:
        super().__init__(folder, key, expected, found)
        self.folder, self.key, self.expected, self.found = folder, key, expected, found

    def __str__(self) -> str:
        return (
            f"backup {self.folder}: expected {self.expected} for {self.key}, found {self.found}. Use another copy of "
            "this backup: a restore from it goes on where this one stopped."
        )


class RestoreRefused(PipelineError):
    """The store already holds something, and the restore was not told to join it."""

    def __init__(self, bucket: str, found: str) -> None:
        super().__init__(bucket, found)
        self.bucket, self.found = bucket, found

    def __str__(self) -> str:
        return (
            f"bucket {self.bucket}: expected an empty one to restore into, found {self.found}. Name an empty bucket "
            "(ROSTER_STORE_BUCKET), or say --into-existing: then what is there stays, and what is missing is added."
        )
