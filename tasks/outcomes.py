"""Which outcome and code each error means: the one table, decided by type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from roster import errors as catalog
from storage import errors as store
from storage.ledger import Outcome
from tasks import errors as pipeline
from tasks import lifecycle_errors as lifecycle
from tasks.bpb import engine_errors as engine
from tasks.bpb import errors as bpb
from tasks.bpb import reference_errors as reference
from tasks.bpb.rulings import Code as ScoreCode
from tasks.lora import errors as lora


class Code(StrEnum):
    """Every code that a step can end with; those of the scores are in `tasks.bpb.verdict.Code`.

    Codes may be added, never renamed.
    """

    # quarantined, in the order of precedence: file, config, names, layout, check, engine, score
    CORRUPT_OR_PARTIAL = "corrupt_or_partial"
    EMPTY_ADAPTER = "empty_adapter"
    AMBIGUOUS_UPLOAD = "ambiguous_upload"
    UNSUPPORTED_DTYPE = "unsupported_dtype"
    PICKLE_REFUSED = "pickle_refused"
    UNSUPPORTED_CONFIG = "unsupported_config"
    UNKNOWN_FAMILY = "unknown_family"
    BASE_MISMATCH = "base_mismatch"
    MALFORMED_KEY = "malformed_key"
    MISSING_TENSOR = "missing_tensor"
    UNEXPECTED_TENSOR = "unexpected_tensor"
    SHAPE_MISMATCH = "shape_mismatch"
    NON_FINITE = "non_finite"
    RANK_UNSUPPORTED = "rank_unsupported"
    NO_EXPERT_KEYS = "no_expert_keys"
    EXPERTS_UNTRAINED = "experts_untrained"
    LAYOUT_CONFLICT = "layout_conflict"
    LAYOUT_UNDECIDED = "layout_undecided"
    DELTA_MISMATCH = "delta_mismatch"
    UNRESOLVED_KEYS = "unresolved_keys"
    REFUSED_BY_ENGINE = "refused_by_engine"
    # waiting
    INCOMPLETE_UPLOAD = "incomplete_upload"
    NO_HELDOUT = "no_heldout"
    UNKNOWN_BASE = "unknown_base"
    AUTHOR_RETIRED = "author_retired"
    # stopped
    STORE_UNAVAILABLE = "store_unavailable"
    ENGINE_UNAVAILABLE = "engine_unavailable"
    ENGINE_UNVERIFIED = "engine_unverified"
    ENGINE_UNSUPPORTED = "engine_unsupported"
    ENGINE_FLAG_MISSING = "engine_flag_missing"
    OPPONENT_GONE = "opponent_gone"
    SOURCE_GONE = "source_gone"
    DISK_FULL = "disk_full"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Ruling:
    """What an error means for the adapter."""

    outcome: Outcome
    code: Code | ScoreCode


_Q, _W, _S, _I = Outcome.QUARANTINED, Outcome.WAITING, Outcome.STOPPED, Outcome.INCONCLUSIVE

RULINGS: Mapping[type[Exception], Ruling] = {
    # The adapter's files.
    lora.MissingConfig: Ruling(_Q, Code.CORRUPT_OR_PARTIAL),
    lora.MissingWeights: Ruling(_Q, Code.CORRUPT_OR_PARTIAL),
    lora.CorruptFile: Ruling(_Q, Code.CORRUPT_OR_PARTIAL),
    lora.EmptyAdapter: Ruling(_Q, Code.EMPTY_ADAPTER),
    lora.EscapingPath: Ruling(_Q, Code.AMBIGUOUS_UPLOAD),
    lora.AmbiguousWeights: Ruling(_Q, Code.AMBIGUOUS_UPLOAD),
    lora.MisspeltFile: Ruling(_Q, Code.AMBIGUOUS_UPLOAD),
    lora.UnreadableName: Ruling(_Q, Code.AMBIGUOUS_UPLOAD),
    lora.UnsupportedDtype: Ruling(_Q, Code.UNSUPPORTED_DTYPE),
    lora.PickleRefused: Ruling(_Q, Code.PICKLE_REFUSED),
    # Its config and its base.
    lora.InvalidConfig: Ruling(_Q, Code.UNSUPPORTED_CONFIG),
    lora.AlphaUndecided: Ruling(_Q, Code.UNSUPPORTED_CONFIG),
    lora.UnsupportedConfig: Ruling(_Q, Code.UNSUPPORTED_CONFIG),
    lora.UnsupportedSourceFormat: Ruling(_Q, Code.UNSUPPORTED_CONFIG),
    lora.UnknownFamily: Ruling(_Q, Code.UNKNOWN_FAMILY),
    lora.InvalidBaseConfig: Ruling(_S, Code.INTERNAL),
    lora.BaseMismatch: Ruling(_Q, Code.BASE_MISMATCH),
    # Its tensors' names and shapes.
    lora.MalformedKey: Ruling(_Q, Code.MALFORMED_KEY),
    lora.CollidingNames: Ruling(_Q, Code.AMBIGUOUS_UPLOAD),
    lora.MissingTensor: Ruling(_Q, Code.MISSING_TENSOR),
    lora.UnexpectedTensor: Ruling(_Q, Code.UNEXPECTED_TENSOR),
    lora.MixedForms: Ruling(_Q, Code.UNEXPECTED_TENSOR),
    lora.NoExpertKeys: Ruling(_Q, Code.NO_EXPERT_KEYS),
    lora.IntentUnmet: Ruling(_Q, Code.MISSING_TENSOR),
    lora.ShapeMismatch: Ruling(_Q, Code.SHAPE_MISMATCH),
    lora.RankUnsupported: Ruling(_Q, Code.RANK_UNSUPPORTED),
    # Its layout and values.
    lora.LayoutConflict: Ruling(_Q, Code.LAYOUT_CONFLICT),
    lora.OrientationUndecided: Ruling(_Q, Code.LAYOUT_UNDECIDED),
    lora.RoleUndecided: Ruling(_Q, Code.LAYOUT_UNDECIDED),
    lora.PackingUndecided: Ruling(_Q, Code.LAYOUT_UNDECIDED),
    pipeline.ReadingsUndecided: Ruling(_Q, Code.LAYOUT_UNDECIDED),
    lora.NonFinite: Ruling(_Q, Code.NON_FINITE),
    lora.ExpertsUntrained: Ruling(_Q, Code.EXPERTS_UNTRAINED),
    lora.RoundTripMismatch: Ruling(_Q, Code.DELTA_MISMATCH),
    lora.DeltaMismatch: Ruling(_Q, Code.DELTA_MISMATCH),
    lora.MergedMismatch: Ruling(_Q, Code.DELTA_MISMATCH),
    lora.ReferenceInvalid: Ruling(_S, ScoreCode.REFERENCE_INVALID),
    lora.UnresolvedKeys: Ruling(_Q, Code.UNRESOLVED_KEYS),
    # The upload and what it refers to.
    store.UploadIncomplete: Ruling(_W, Code.INCOMPLETE_UPLOAD),
    store.UploadChanged: Ruling(_W, Code.INCOMPLETE_UPLOAD),
    store.UploadCorrupt: Ruling(_Q, Code.CORRUPT_OR_PARTIAL),
    store.BaseConflict: Ruling(_Q, Code.BASE_MISMATCH),
    store.UploadAmbiguous: Ruling(_Q, Code.AMBIGUOUS_UPLOAD),
    store.UnknownBase: Ruling(_W, Code.UNKNOWN_BASE),
    store.BaseUndecided: Ruling(_W, Code.UNKNOWN_BASE),
    store.HeldoutMissing: Ruling(_W, Code.NO_HELDOUT),
    store.AuthorRetired: Ruling(_W, Code.AUTHOR_RETIRED),
    store.InvalidDocument: Ruling(_S, Code.INTERNAL),
    pipeline.SourceGone: Ruling(_S, Code.SOURCE_GONE),
    pipeline.DiskFull: Ruling(_S, Code.DISK_FULL),
    pipeline.NotReproducible: Ruling(_S, Code.INTERNAL),
    # The store.
    store.StoreUnavailable: Ruling(_S, Code.STORE_UNAVAILABLE),
    store.StoreNotTrusted: Ruling(_S, Code.STORE_UNAVAILABLE),
    store.LedgerBusy: Ruling(_S, Code.STORE_UNAVAILABLE),
    store.ObjectNotFound: Ruling(_S, Code.SOURCE_GONE),
    # The engine. A refusal is the adapter's own only when the engine is well otherwise (tasks/scoring.py).
    engine.EngineRefused: Ruling(_Q, Code.REFUSED_BY_ENGINE),
    engine.EngineUnavailable: Ruling(_S, Code.ENGINE_UNAVAILABLE),
    engine.EngineProtocolError: Ruling(_S, Code.ENGINE_UNAVAILABLE),
    engine.EngineFlagMissing: Ruling(_S, Code.ENGINE_FLAG_MISSING),
    engine.EngineUnsupported: Ruling(_S, Code.ENGINE_UNSUPPORTED),
    pipeline.EngineDied: Ruling(_S, Code.ENGINE_UNAVAILABLE),
    pipeline.AdapterKillsEngine: Ruling(_Q, Code.REFUSED_BY_ENGINE),
    pipeline.NoEngine: Ruling(_S, Code.ENGINE_UNAVAILABLE),
    pipeline.LeaseNotGranted: Ruling(_S, Code.ENGINE_UNAVAILABLE),
    pipeline.LeaseLost: Ruling(_S, Code.ENGINE_UNAVAILABLE),
    pipeline.EngineChanged: Ruling(_S, ScoreCode.ENGINE_DRIFT),
    pipeline.EngineUnverified: Ruling(_S, Code.ENGINE_UNVERIFIED),
    pipeline.EngineNotQualified: Ruling(_S, Code.ENGINE_UNVERIFIED),
    pipeline.EngineUnfit: Ruling(_S, Code.ENGINE_FLAG_MISSING),
    pipeline.EngineTooOld: Ruling(_S, Code.ENGINE_UNSUPPORTED),
    pipeline.OpponentRefused: Ruling(_S, Code.INTERNAL),
    pipeline.OpponentGone: Ruling(_S, Code.OPPONENT_GONE),
    pipeline.FilesDamaged: Ruling(_S, Code.INTERNAL),
    pipeline.BaseChanged: Ruling(_S, Code.INTERNAL),
    # The scores.
    bpb.HeldoutUnusable: Ruling(_I, ScoreCode.TOO_LITTLE_TEXT),
    bpb.DuplicateUnit: Ruling(_S, Code.INTERNAL),
    bpb.TokenizerUnsupported: Ruling(_S, Code.ENGINE_UNVERIFIED),
    bpb.WindowInvalid: Ruling(_S, Code.ENGINE_FLAG_MISSING),
    bpb.SubjectsInvalid: Ruling(_S, Code.INTERNAL),
    bpb.MeasurementVoid: Ruling(_S, Code.ENGINE_UNAVAILABLE),
    bpb.EngineUnsteady: Ruling(_S, ScoreCode.ENGINE_DRIFT),
    bpb.ThresholdsInvalid: Ruling(_S, Code.INTERNAL),
}

RULED: tuple[type[Exception], ...] = tuple(RULINGS)
"""What a step turns into an outcome. Anything else stops the run and surfaces whole."""

NOT_THERE: tuple[type[Exception], ...] = (
    catalog.CatalogMissing,
    catalog.CatalogSchemaMismatch,
    catalog.CatalogDamaged,
    catalog.CatalogHeld,
    catalog.CatalogBusy,
    catalog.CatalogChanged,
    catalog.CatalogNotLocal,
    catalog.CatalogWriteFailed,
    catalog.RosterDrop,
    catalog.UnknownBase,
    catalog.RankNotServeable,
    reference.LibraryMissing,
    pipeline.MatrixDrift,
    lifecycle.RosterNamesAuthor,
    lifecycle.BackupDamaged,
    pipeline.NothingPublished,
    pipeline.StillServed,
)
"""What says that the catalog cannot be used or written now; no adapter is judged by it."""

MISUSE: tuple[type[Exception], ...] = (
    catalog.PlanImpossible,
    catalog.QueryRefused,
    catalog.UnknownAuthor,
    catalog.UnknownView,
    lora.DestinationExists,
    lora.DeviceMissing,
    store.InvalidName,
    store.NameTaken,
    store.NoWeights,
    store.UploadRaced,
    store.UploadRefused,
    reference.ModelUnusable,
    reference.HeldoutFileInvalid,
    reference.PackingUnstated,
    reference.AdapterNotRead,
    pipeline.NobodyServed,
    pipeline.NotServed,
    lifecycle.AdapterNotNamed,
    lifecycle.PinRefused,
    lifecycle.BackupRefused,
    lifecycle.RestoreRefused,
    pipeline.OtherServer,
)
"""What only a command line can meet: something to correct there and then."""


TRANSIENT: tuple[type[Exception], ...] = (store.UploadCorrupt,)
"""What is said of the bytes that came, not of those that were promised: the same adapter may yet come whole."""


def rule(error: Exception) -> Ruling:
    """The ruling on an error of the table, its class's or the nearest parent's.

    Raises:
        KeyError: the table does not know it.
    """
    for kind in type(error).__mro__:
        if kind in RULINGS:
            return RULINGS[kind]
    raise KeyError(type(error))


def list_problems(error: Exception) -> tuple[Exception, ...]:
    """A ruled error, and after it everything else that was found wrong with the same adapter."""
    return (error, *error.others) if isinstance(error, lora.AdapterError) else (error,)


_RECORDED, _LETTERS = 20, 1_000
"""How many problems a step's result tells, and how much of each."""


def refusal(error: Exception) -> dict[str, Any]:
    """A ruled error as a step's result; `codes` has each code of its problems once.

    `problems` tells the first and, up to a limit, all others: the code, where, and the message of each. `transient`
    is there only for an error of TRANSIENT.
    """
    problems = list_problems(error)
    codes = list(dict.fromkeys(rule(one).code.value for one in problems))
    told = [
        {
            "code": rule(one).code.value,
            "where": getattr(one, "where", None),
            "message": str(one)[:_LETTERS],
        }
        for one in problems[:_RECORDED]
    ]
    return {
        "code": codes[0],
        "codes": codes,
        "reason": str(error),
        "where": getattr(error, "where", None),
        "problems": told,
        **({"transient": True} if isinstance(error, TRANSIENT) else {}),
    }


def is_transient(result: Mapping[str, Any]) -> bool:
    """Whether a step's result is a refusal that another try may not meet with."""
    return bool(result.get("transient"))


def refused_document(error: Exception) -> dict[str, Any]:
    """A ruled error as `--json` prints it."""
    result = refusal(error)
    refused = {
        "code": result["code"],
        "message": result["reason"],
        "where": result["where"],
        "all": result["codes"],
    }
    return {"refused": refused}


def stoppage(error: Exception) -> dict[str, Any]:
    """An error that the table does not know, as a step's result: it is ours."""
    code = Code.INTERNAL.value
    return {"code": code, "codes": [code], "reason": f"{type(error).__name__}: {error}", "where": None}
