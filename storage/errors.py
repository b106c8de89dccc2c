"""Every way in which the object store, or what lies in it, can fail us."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any


class StorageError(Exception):
    """A failure of the store, its documents or its names; keeps its facts as attributes and pickles."""

    def __init__(self, message: str, *facts: object) -> None:
        super().__init__(message)
        self._facts = facts

    def __reduce__(self) -> tuple[type[StorageError], tuple[Any, ...]]:
        """Return how to build this error again in another process: its class and its facts."""
        return type(self), self._facts


class ObjectNotFound(StorageError):
    """The store holds no object under this key."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"{key}: expected an object in the store, found none. "
            "Was it deleted, or is this another bucket than the one it was written to?",
            key,
        )
        self.key = key


class PreconditionFailed(StorageError):
    """A conditional request was refused: the object is there already, or is no longer the one read."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"{key}: expected the object as it was read, found that someone else wrote it since. "
            "Read it again and decide anew.",
            key,
        )
        self.key = key


class StoreUnavailable(StorageError):
    """The store could not do what was asked: network, time-out, overload, credentials, missing bucket."""

    def __init__(self, operation: str, key: str, reason: str) -> None:
        super().__init__(
            f"{operation} {key}: the object store did not do it: {reason}", operation, key, reason
        )
        self.operation = operation
        self.key = key
        self.reason = reason


class StoreNotTrusted(StorageError):
    """The store breaks a promise the ledger rests on, so nothing may be written to it."""

    def __init__(self, endpoint: str, probe: str, found: str) -> None:
        super().__init__(
            f"object store {endpoint}: {probe}; found: {found}. Two workers would overwrite each other's "
            "records here. Use a store that honours If-None-Match and If-Match on put, such as SeaweedFS.",
            endpoint,
            probe,
            found,
        )
        self.endpoint = endpoint
        self.probe = probe
        self.found = found


class InvalidName(StorageError, ValueError):
    """A name or key part breaks the naming rule; `suggestion` is a name that would do, or None."""

    def __init__(self, kind: str, value: str, rule: str, suggestion: str | None = None) -> None:
        advice = "Choose another." if suggestion is None else f"Try {suggestion!r}."
        super().__init__(f"{kind} {value!r}: expected {rule}. {advice}", kind, value, rule, suggestion)
        self.kind = kind
        self.value = value
        self.rule = rule
        self.suggestion = suggestion


class NameTaken(StorageError):
    """A name is too near to one in use: an author of the same folded name, or a served base."""

    def __init__(self, kind: str, value: str, existing: str) -> None:
        super().__init__(
            f"{kind} {value!r}: expected a name of its own, found {existing}. Use that one if you mean it, "
            "else choose a name that differs by more than case and '.', '_', '-'.",
            kind,
            value,
            existing,
        )
        self.kind = kind
        self.value = value
        self.existing = existing


class InvalidDocument(StorageError):
    """A stored or submitted document does not say what its model asks for."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(
            f"{key}: not a document we can use: {reason.rstrip('.')}. Correct it and write it again.",
            key,
            reason,
        )
        self.key = key
        self.reason = reason


class UploadRefused(StorageError):
    """A local directory cannot be submitted as it is."""

    def __init__(self, directory: str, reason: str) -> None:
        super().__init__(f"{directory}: cannot be submitted: {reason}", directory, reason)
        self.directory = directory
        self.reason = reason


class UploadRaced(StorageError):
    """Two submissions of one run were made at once; this one did not get the marker."""

    def __init__(self, author: str, run: str) -> None:
        super().__init__(
            f"{author}/{run}: expected to put the marker last, found that another submission of this run put "
            "its own meanwhile. Files of both may be mixed: submit once more, or under another run.",
            author,
            run,
        )
        self.author = author
        self.run = run


class UploadIncomplete(StorageError):
    """An upload is not there as its marker says: still uploading, or being replaced. It waits."""

    def __init__(self, author: str, run: str, reason: str) -> None:
        super().__init__(
            f"{author}/{run}: the upload is not complete: {reason}. It waits; "
            "submit it again if the upload was broken off.",
            author,
            run,
            reason,
        )
        self.author = author
        self.run = run
        self.reason = reason


class UploadAmbiguous(StorageError):
    """An upload's marker names files that cannot be told apart or lie outside of it."""

    def __init__(self, author: str, run: str, reason: str) -> None:
        super().__init__(
            f"{author}/{run}: the upload is ambiguous: {reason}. Expected one save's files, under plain names that "
            "can be told apart: put those into a folder of their own, and submit that.",
            author,
            run,
            reason,
        )
        self.author = author
        self.run = run
        self.reason = reason


class UploadChanged(StorageError):
    """An upload was overwritten while it was being downloaded."""

    def __init__(self, author: str, run: str, file: str) -> None:
        super().__init__(
            f"{author}/{run}: {file} was replaced in the store during the download; expected the bytes that "
            "were there at intake. Take the upload in again.",
            author,
            run,
            file,
        )
        self.author = author
        self.run = run
        self.file = file


class UploadCorrupt(StorageError):
    """A file of an upload is, and stays, other bytes than its marker promises."""

    def __init__(self, author: str, run: str, file: str, expected: str, found: str) -> None:
        super().__init__(
            f"{author}/{run}: {file} should have sha256 {expected}, downloaded twice it has {found}. "
            "Submit it again from the original files.",
            author,
            run,
            file,
            expected,
            found,
        )
        self.author = author
        self.run = run
        self.file = file
        self.expected = expected
        self.found = found


class UnknownBase(StorageError):
    """An upload names a base that nobody registered. It waits."""

    def __init__(self, base: str, known: Sequence[str]) -> None:
        names = ", ".join(known) if known else "none"
        super().__init__(
            f"base {base!r}: expected a registered base, found: {names}. "
            f"Register it with `roster base add {base}`.",
            base,
            tuple(known),
        )
        self.base = base
        self.known = tuple(known)


class BaseUndecided(StorageError):
    """Files that came without a marker name no base that is registered. They wait."""

    def __init__(self, author: str, run: str, stated: str | None, where: str, known: Sequence[str]) -> None:
        found = f"no base in {where}" if stated is None else f"{stated[:200]!r} in {where}"
        name = "NAME" if stated is None else repr(stated[:200])
        super().__init__(
            f"{author}/{run}: expected its files to name a registered base ({', '.join(known) or 'there is none'}), "
            f"found {found}. Register the base under that name (`roster base add … --alias {name}`), or put a "
            'training.json with "base" beside the files, or name the base with '
            f"`roster submit DIR --author {author} --base BASE`.",
            author,
            run,
            stated,
            where,
            tuple(known),
        )
        self.author = author
        self.run = run
        self.stated = stated
        self.where = where
        self.known = tuple(known)


class NoWeights(StorageError):
    """A directory that should hold a base's weights holds no weight file."""

    def __init__(self, directory: str) -> None:
        super().__init__(
            f"{directory}: expected the base's weights (*.safetensors or *.bin), found none. "
            "Name the folder that holds them.",
            directory,
        )
        self.directory = directory


class HeldoutMissing(StorageError):
    """A held-out set that nobody registered, or, with `name` None, an author who has none. It waits."""

    def __init__(self, author: str, name: str | None, known: Sequence[str]) -> None:
        names = ", ".join(known) if known else "none"
        super().__init__(
            f"held-out set {author}/{name or '*'}: expected it in the store, found for {author}: {names}. "
            f"Register one with `roster heldout add {author} {name or 'NAME'} FILE`.",
            author,
            name,
            tuple(known),
        )
        self.author = author
        self.name = name
        self.known = tuple(known)


class AuthorRetired(StorageError):
    """An author's uploads are not taken up, because an operator retired or purged the author. They wait."""

    def __init__(self, author: str, base: str | None, act: str, who: str, at: datetime, why: str) -> None:
        where = "every base" if base is None else f"base {base}"
        super().__init__(
            f"author {author}: expected one whose uploads are taken up, found the {act} of {who} for {where}, "
            f"{at:%Y-%m-%dT%H:%M:%SZ}: {why.rstrip('.')}. It waits; `roster release {author}` ends that.",
            author,
            base,
            act,
            who,
            at,
            why,
        )
        self.author = author
        self.base = base
        self.act = act
        self.who = who
        self.at = at
        self.why = why


class ClaimHeld(StorageError):
    """Someone else works on this adapter."""

    def __init__(self, key: str, holder: str, expires_at: datetime) -> None:
        super().__init__(
            f"{key}: {holder} works on this adapter and claims it until {expires_at:%Y-%m-%dT%H:%M:%SZ}. "
            "Leave it, or try again after that time.",
            key,
            holder,
            expires_at,
        )
        self.key = key
        self.holder = holder
        self.expires_at = expires_at


class ClaimLost(StorageError):
    """This holder's claim is gone, so it may not write; `found` is who has it now, or None."""

    def __init__(self, key: str, holder: str, found: str | None) -> None:
        super().__init__(
            f"{key}: expected the claim of {holder}, found {found or 'no claim'}. "
            "Another worker took over after the claim ran out: stop, the work is in its hands.",
            key,
            holder,
            found,
        )
        self.key = key
        self.holder = holder
        self.found = found


class BaseConflict(StorageError):
    """The same adapter was judged ready for one base and is now submitted for another."""

    def __init__(self, key: str, known: str, submitted: str) -> None:
        super().__init__(
            f"{key}: this very adapter is ready for base {known}; it was submitted again for base {submitted}, for "
            f"which nothing was shown. An adapter belongs to one base: submit it for {known}, or train anew.",
            key,
            known,
            submitted,
        )
        self.key = key
        self.known = known
        self.submitted = submitted


class LedgerBusy(StorageError):
    """A ledger, or another swapped object, changed under every one of our attempts to write it."""

    def __init__(self, key: str, attempts: int) -> None:
        super().__init__(
            f"{key}: expected to write within {attempts} attempts, found the object changed each time. "
            "Is something writing it in a loop? Try again.",
            key,
            attempts,
        )
        self.key = key
        self.attempts = attempts
