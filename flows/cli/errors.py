"""What each kind of error means at the command line: one message, one exit code, and what --json prints."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from cyclopts import CycloptsError

if TYPE_CHECKING:
    from pydantic import ValidationError

REFUSED, USAGE, UNAVAILABLE = 1, 2, 3

_WRONG_PATH = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


@dataclass(frozen=True, slots=True)
class Explained:
    """A foreseen error, as the command ends with it. others: what else is wrong, a line for each."""

    exit_code: int
    message: str
    document: dict[str, Any]
    others: tuple[str, ...] = ()


def explain(error: Exception) -> Explained | None:
    """How the command ends for this error; None for one that nobody foresaw."""
    if isinstance(error, CycloptsError):
        command = " ".join(("roster", *(error.command_chain or ()), "--help"))
        return _explained(USAGE, f"{error} See: {command}")
    from pydantic import ValidationError

    from flows.retry_errors import CatalogBehind, PrefectNeeded, UnknownUpload
    from flows.settings import Settings, SettingsIncomplete

    if isinstance(error, UnknownUpload):
        return _explained(USAGE, str(error))
    if isinstance(error, (CatalogBehind, PrefectNeeded)):
        return _explained(UNAVAILABLE, str(error))
    if isinstance(error, SettingsIncomplete):
        return _explained(UNAVAILABLE, str(error))
    if isinstance(error, ValidationError) and error.title == Settings.__name__:
        return _explained(USAGE, _describe_settings(error))
    return _explain_known(error)


def _explain_known(error: Exception) -> Explained | None:
    # Imported here: `roster --help` and wrong usage should not wait for all of this.
    from roster.errors import UnknownAuthor
    from storage.errors import InvalidDocument, UnknownBase
    from storage.ledger import Outcome
    from tasks.lora.errors import InvalidBaseConfig
    from tasks.outcomes import MISUSE, NOT_THERE, RULED, list_problems, refused_document, rule

    if isinstance(error, UnknownAuthor):
        return _explained(USAGE, f"{error}{_suggest(error.author, error.known)}")
    # In the pipeline these say nothing of the adapter; here they are what the user named.
    if isinstance(error, (*MISUSE, InvalidBaseConfig, InvalidDocument, UnknownBase)):
        return _explained(USAGE, str(error))
    if isinstance(error, NOT_THERE):
        return _explained(UNAVAILABLE, str(error))
    if isinstance(error, RULED):
        if rule(error).outcome in {Outcome.QUARANTINED, Outcome.INCONCLUSIVE}:
            first, *others = map(str, list_problems(error))
            return Explained(REFUSED, first, refused_document(error), tuple(others))
        return _explained(UNAVAILABLE, str(error))
    if _is_of_the_services(error):
        return _explained(UNAVAILABLE, str(error))
    if isinstance(error, OSError):
        code = USAGE if isinstance(error, _WRONG_PATH) else UNAVAILABLE
        return _explained(code, f"{error.filename or 'input or output'}: {error.strerror or error}")
    return None


def _is_of_the_services(error: Exception) -> bool:
    from flows.embedded import EmbeddedFailedError, StopTimedOutError
    from flows.embedded_plan import StoreProgramMissingError
    from flows.ports import NoFreePortError
    from flows.services import HomeBusyError, StateUnreadableError
    from flows.supervisor import ChildFailedError
    from flows.up import EngineIncomplete

    failures = (
        *(ChildFailedError, EmbeddedFailedError, EngineIncomplete, HomeBusyError, NoFreePortError),
        *(StateUnreadableError, StopTimedOutError, StoreProgramMissingError),
    )
    return isinstance(error, failures)


def _explained(exit_code: int, message: str) -> Explained:
    return Explained(exit_code, message, {"error": message})


def _suggest(author: str, known: tuple[str, ...]) -> str:
    near = get_close_matches(author.casefold(), known)
    return f". Did you mean {' or '.join(near)}?" if near else ""


def _describe_settings(error: ValidationError) -> str:
    faults = (
        f"ROSTER_{str(fault['loc'][0]).upper()}={fault['input']}: {fault['msg']}" for fault in error.errors()
    )
    return f"{'; '.join(faults)}. Correct or unset it"
