"""What a flow run of one adapter tells beside the ledger: its tags, its page, and whom it has to tell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from prefect.client.orchestration import get_client
from prefect.runtime import flow_run

from flows.asking import Log
from flows.notify import REFUSED, Notice, find_notice, send_notice
from flows.services import read_services
from flows.settings import Settings
from storage.bases import Base
from storage.claims import read_ledger
from storage.keys import upload_prefix
from storage.ledger import Ledger, Outcome, Step
from storage.s3 import S3Store
from storage.training import redact_uri
from tasks.intake import Taken
from tasks.job import Job
from tasks.page import OF_ENGINE, EngineLog, Surroundings, publish_page, render_notice, render_page

_TAIL_LINES, _TAIL_BYTES = 20, 16_000
_LETTERS = 500
_NO_PAGE = "its page could not be put up"
_UNTOLD = "nobody could be told of it"


@contextmanager
def aside(log: Log, what: str) -> Iterator[None]:
    """Do something that only tells of a run: whatever keeps it from being done is one line in the log.

    What the run found stands in its adapter's ledger; a server that refuses a tag or a page is no reason to fail.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - of whatever kind
        said = " ".join(f"{type(error).__name__}: {error}".split())
        log.warning("%s; the run goes on without: %s", what, said[:_LETTERS])


@dataclass(frozen=True, slots=True)
class Walk:
    """How a run went: the steps that it went by, None where it did not come so far, and the one that ended it."""

    inspected: Step | None
    checked: Step | None
    ending: Step


@dataclass(frozen=True, slots=True)
class Teller:
    """Tells of one flow run. Each of its methods puts the run's page up and says what others have to know.

    None of them raises: what cannot be told is a line in the log.
    """

    settings: Settings
    store: S3Store
    author: str
    run: str
    log: Log

    def tag(self, base: str | None) -> None:
        """Tag the flow run with author and base, so that the UI can be filtered by them; tags of others stay."""
        if flow_run.id is None:
            return
        ours = {f"author:{self.author}", *([f"base:{base}"] if base else [])}
        tags = set(flow_run.tags)
        if not ours <= tags:
            with self._aside("it could not be tagged"), get_client(sync_client=True) as client:
                client.update_flow_run(flow_run.id, tags=sorted(tags | ours))

    def walked(self, job: Job, walk: Walk) -> None:
        """Tell how a run went that had its adapter's claim."""
        ledger = job.ledger.document
        with self._aside(_NO_PAGE):
            engine = self._engine(job.base, walk.ending) if job.done_here else None
            around = self._around(engine, did_nothing=not job.done_here)
            page = render_page(job.label, ledger, walk.inspected, walk.checked, walk.ending, around)
            publish_page(self.author, self.run, page)
        if job.done_here:
            self._notify(ledger, walk.ending)

    def broken(self, job: Job) -> None:
        """Tell of an error that no table knows, which its step has put on the record."""
        last = job.ledger.document.steps[-1:]
        if job.done_here and last and last[0].outcome is Outcome.STOPPED:
            self.walked(job, Walk(None, None, last[0]))

    def hindered(self, taken: Taken | None, title: str, reason: str, code: str) -> None:
        """Tell why nothing could begin; taken: the upload, None where it is not complete and has no ledger."""
        if taken is None:
            self.apart(title, reason, code)
            return
        ledger = None
        with self._aside(_NO_PAGE):
            ledger, _ = read_ledger(self.store, self.author, taken.upload.adapter_digest)
            label = f"{self.author}/{self.run}"
            page = render_page(label, ledger, None, None, ledger.steps[-1], self._around())
            publish_page(self.author, self.run, page)
        if ledger is not None:
            self._notify(ledger, ledger.steps[-1])

    def apart(self, title: str, reason: str, code: str | None = None) -> None:
        """Tell of a run that had no part in the adapter's ledger: what it found."""
        label = f"{self.author}/{self.run}"
        with self._aside(_NO_PAGE):
            publish_page(self.author, self.run, render_notice(label, title, reason, code, self._around()))

    def refused(self, reason: str, code: str) -> None:
        """Tell of an upload that cannot be taken up, and has no ledger to say so."""
        self.apart(f"{REFUSED}: {code}", reason, code)
        key = f"{code}/{reason}"
        with self._aside(_UNTOLD):
            notice = Notice(self.author, self.run, None, REFUSED, code, reason, str(flow_run.id), key)
            send_notice(notice, self.settings.notify_url, self.log)

    def _aside(self, what: str) -> AbstractContextManager[None]:
        return aside(self.log, f"{self.author}/{self.run}: {what}")

    def _notify(self, ledger: Ledger, ending: Step) -> None:
        with self._aside(_UNTOLD):
            notice = find_notice(ledger, self.run, ending, str(flow_run.id))
            if notice is not None:
                send_notice(notice, self.settings.notify_url, self.log)

    def _around(self, engine: EngineLog | None = None, *, did_nothing: bool = False) -> Surroundings:
        return Surroundings(
            flow_run=str(flow_run.id),
            upload_uri=self.store.uri(upload_prefix(self.author, self.run)),
            docs_url=self.settings.docs_url,
            engine=engine,
            did_nothing=did_nothing,
        )

    def _engine(self, base: Base, ending: Step) -> EngineLog | None:
        """The end of the engine's log, in this run's log too, where the run ended for the engine's sake."""
        code, url = ending.result.get("code"), base.document.engine.url
        if code not in OF_ENGINE or url is None:
            return None
        path = engine_log(self.settings.home, base.name, url)
        engine = EngineLog(redact_uri(url), path, read_tail(path) if path is not None else ())
        if path is not None:
            self.log.warning("the last lines of %s:\n%s", path, "\n".join(engine.tail))
        return engine


def engine_log(home: Path, base: str, url: str) -> Path | None:
    """The log of the engine of a base, where it is one of the services embedded in this home; else None."""
    services = read_services(home)
    if services is None or services.engines.get(base) != url:
        return None
    return services.engine_log(base)


def read_tail(path: Path) -> tuple[str, ...]:
    """The last lines of a log, each of bounded length; none where it is not there."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = stream.read(_TAIL_BYTES).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ()
    return tuple(text.splitlines()[-_TAIL_LINES:])
