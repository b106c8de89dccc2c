import pickle  # noqa: TID251 - errors cross process borders this way
from datetime import UTC, datetime

import pytest

from storage import errors

EXAMPLES: dict[errors.StorageError, list[str]] = {
    errors.ObjectNotFound("ledger/a/b.json"): ["ledger/a/b.json", "found none", "another bucket"],
    errors.PreconditionFailed("k"): ["k:", "as it was read", "someone else wrote it", "Read it again"],
    errors.StoreUnavailable("get", "k", "timed out"): ["get k", "timed out"],
    errors.StoreNotTrusted("http://x", "a stale put", "accepted"): [
        "http://x",
        "a stale put",
        "accepted",
        "Use",
    ],
    errors.InvalidName("author", "A", "the rule", "a"): ["author 'A'", "the rule", "Try 'a'"],
    errors.NameTaken("author", "a-b", "author ab"): ["author 'a-b'", "author ab", "choose a name"],
    errors.InvalidDocument("k", "no JSON"): ["k:", "no JSON", "Correct it"],
    errors.UploadRefused("/dir", "no files"): ["/dir", "no files"],
    errors.UploadRaced("ada", "r1"): ["ada/r1", "marker", "submit once more"],
    errors.UploadIncomplete("ada", "r1", "x is missing"): ["ada/r1", "x is missing", "submit it again"],
    errors.UploadAmbiguous("ada", "r1", "two of x"): ["ada/r1", "two of x", "plain names", "submit that"],
    errors.UploadChanged("ada", "r1", "w.safetensors"): ["ada/r1", "w.safetensors", "replaced", "again"],
    errors.UploadCorrupt("ada", "r1", "w", "aa", "bb"): [
        "ada/r1: w",
        "sha256 aa",
        "it has bb",
        "Submit it again",
    ],
    errors.UnknownBase("tiny", ["big", "huge"]): ["'tiny'", "big, huge", "roster base add tiny"],
    errors.BaseUndecided("ada", "r1", "Org/Big", "adapter_config.json", ["tiny"]): [
        "ada/r1: expected its files to name a registered base (tiny)",
        "found 'Org/Big' in adapter_config.json",
        "roster base add … --alias 'Org/Big'",
        'training.json with "base"',
        "roster submit DIR --author ada --base BASE",
    ],
    errors.BaseUndecided("ada", "r1", None, "adapter_config.json", []): [
        "there is none",
        "found no base in adapter_config.json",
        "--alias NAME",
    ],
    errors.NoWeights("/weights"): ["/weights", "*.safetensors", "found none", "Name the folder"],
    errors.HeldoutMissing("ada", "letters", []): ["ada/letters", "none", "roster heldout add ada letters"],
    errors.ClaimHeld("k", "w1", datetime(2026, 3, 1, 12, 0, tzinfo=UTC)): [
        "k:",
        "w1",
        "2026-03-01T12:00:00Z",
        "again",
    ],
    errors.ClaimLost("k", "w1", "w2"): ["k:", "claim of w1", "found w2", "stop"],
    errors.BaseConflict("k", "tiny", "small"): ["k:", "ready for base tiny", "for base small", "train anew"],
    errors.AuthorRetired(
        "ada", "tiny", "retire", "mira", datetime(2026, 3, 1, 12, 0, tzinfo=UTC), "she left"
    ): [
        "author ada",
        "the retire of mira for base tiny, 2026-03-01T12:00:00Z: she left.",
        "roster release ada",
    ],
    errors.LedgerBusy("k", 100): ["k:", "100 attempts", "changed each time", "Try again"],
}


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_every_error_says_its_facts_and_survives_pickling(error: errors.StorageError) -> None:
    for fact in EXAMPLES[error]:
        assert fact in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
    assert len(vars(error)) > 1


def test_no_error_is_left_out_above() -> None:
    defined = {value for value in vars(errors).values() if isinstance(value, type)}
    kinds = {kind for kind in defined if issubclass(kind, errors.StorageError)} - {errors.StorageError}
    assert kinds == {type(error) for error in EXAMPLES}
