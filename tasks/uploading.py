"""A converted adapter's large files on their way to the store while it is checked.

Only their parts: nobody sees any of them before staging has `finish` complete them, and staging comes after the check.
What goes wrong here is no error of the check; staging does again what is missing, and sends no part twice.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from storage.digests import FileDigest
from storage.errors import StorageError
from storage.keys import control_prefix, serving_prefix
from storage.ledger import Step, StepKind
from storage.multipart import SentParts, goes_in_parts
from tasks.job import Job
from tasks.readings import undecided_parameters
from tasks.transfer import recorded_files


class EarlyUpload:
    """The large files of a folder that was converted just now; one thread of its own begins them at once."""

    def __init__(self, job: Job, files: Sequence[tuple[Path, str, FileDigest]]) -> None:
        self._job, self._files = job, files
        self._sent: list[SentParts] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._send, name="early upload", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the parts are there, and make objects of them, as far as that can be done now."""
        self._thread.join()
        for parts in self._sent:
            try:
                self._job.store.complete_parts(parts)
            except StorageError as error:
                self._tell(parts.key, error)

    def stop(self) -> None:
        """Begin no more parts, and wait for those that are being sent; the store keeps what it has."""
        self._stopped.set()
        self._thread.join()

    def _send(self) -> None:
        for path, key, file in self._files:
            if self._stopped.is_set():
                return
            try:
                known = self._job.store.head(key)
                if known is not None and (known.bytes, known.sha256) == (file.bytes, file.sha256):
                    continue
                parts = self._job.store.send_parts(
                    path, key, sha256=file.sha256, is_stopped=self._stopped.is_set
                )
            except (StorageError, OSError) as error:
                self._tell(key, error)
                continue
            if parts is None:
                return
            self._sent.append(parts)

    def _tell(self, key: str, error: Exception) -> None:
        self._job.log.info("%s: %s is sent when it is staged: %s", self._job.label, key, error)


def upload_early(job: Job, inspected: Step, converted: Step) -> EarlyUpload | None:
    """Begin to send what this run has converted, where there are large files and no other reading of them may follow.

    What an earlier run converted that run began to send; staging finds how far it came.
    """
    if StepKind.CONVERTED not in job.done_here or undecided_parameters(inspected):
        return None
    own = str(converted.result["output_digest"])
    directory, prefix = job.converted_path(own), serving_prefix(job.author, own)
    files = [
        (directory / file.name, prefix + file.name, file)
        for file in recorded_files(converted.result["files"])
        if goes_in_parts(file.bytes)
    ]
    return EarlyUpload(job, files) if files else None


def drop_parts(job: Job, converted: Step) -> None:
    """Take away what the store has of files that will not be staged, by this run or by one that was killed.

    Raises:
        StoreUnavailable: the store did not do it.
    """
    control: Any = converted.result["control"]
    outputs = (
        (serving_prefix(job.author, str(converted.result["output_digest"])), converted.result["files"]),
        (control_prefix(job.author, str(control["output_digest"])), control["files"]),
    )
    for prefix, recorded in outputs:
        if any(goes_in_parts(file.bytes) for file in recorded_files(recorded)):
            for pending in job.store.list_pending(prefix):
                job.store.abort_upload(pending)
