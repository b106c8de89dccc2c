"""What can go wrong where the parts meet: between upload, conversion, engine and ledger."""

from __future__ import annotations


class PipelineError(Exception):
    """The parent of the errors of the steps themselves; keeps its facts and pickles."""


class SourceGone(PipelineError):
    """A file of the upload was deleted while the pipeline needed it."""

    def __init__(self, adapter: str, key: str) -> None:
        super().__init__(adapter, key)
        self.adapter, self.key = adapter, key

    def __str__(self) -> str:
        return (
            f"{self.adapter}: {self.key} was in the store at intake and is gone now. What is served stays as it is; "
            "upload the adapter again if it is still wanted."
        )


class DiskFull(PipelineError):
    """A folder's disk has no room for what a run has to write there."""

    def __init__(self, adapter: str, folder: str, expected: str, found: str) -> None:
        super().__init__(adapter, folder, expected, found)
        self.adapter, self.folder, self.expected, self.found = adapter, folder, expected, found

    def __str__(self) -> str:
        return (
            f"{self.adapter}: expected {self.expected} on the disk of {self.folder}, found {self.found}. Make room "
            "there: `served` below ROSTER_HOME/work holds converted adapters that can be fetched again, and while "
            "nothing runs all of `work` may go; or set ROSTER_HOME to a folder on a larger disk. This run is taken up "
            "again by itself."
        )


class NotReproducible(PipelineError):
    """Converting the same upload again gave other bytes, although the code's version is the same."""

    def __init__(self, adapter: str, expected: tuple[str, str], found: tuple[str, str]) -> None:
        super().__init__(adapter, expected, found)
        self.adapter, self.expected, self.found = adapter, expected, found

    def __str__(self) -> str:
        return (
            f"{self.adapter}: converting again gave {', '.join(d[:16] for d in self.found)}, the ledger records "
            f"{', '.join(d[:16] for d in self.expected)} (adapter, control). Two workers run different code under one "
            "step version: bring them to the same release, then force the run."
        )


class ReadingsUndecided(PipelineError):
    """Nothing tells an adapter's packing, and neither reading of it scores better beyond doubt."""

    def __init__(self, adapter: str, parameters: str, found: str, expected: str) -> None:
        super().__init__(adapter, parameters, found, expected)
        self.adapter, self.parameters, self.found, self.expected = adapter, parameters, found, expected

    def __str__(self) -> str:
        return (
            f"{self.adapter}: the packing of {self.parameters}: no statement names it, its tensors do not tell, and "
            f"neither do the scores of both readings: found {self.found}; expected {self.expected}. State "
            "lora_B_layout in training.json, or set a policy (`roster policy set`), and submit it again; or force a "
            "reading with `roster convert --packing` and submit what that wrote."
        )


class NoEngine(PipelineError):
    """The base has no engine's address, so nothing can be scored."""

    def __init__(self, base: str) -> None:
        super().__init__(base)
        self.base = base

    def __str__(self) -> str:
        return (
            f"base {self.base}: expected the address of a vLLM server, found none. Register the base again with "
            "--engine-url, or start the embedded services with `roster up --base`."
        )


class EngineUnverified(PipelineError):
    """The engine of a base has not told what it is, so its scores could not be compared with anything."""

    def __init__(self, base: str, key: str, found: str) -> None:
        super().__init__(base, key, found)
        self.base, self.key, self.found = base, key, found

    def __str__(self) -> str:
        return (
            f"base {self.base}: expected the engine to have published {self.key}, found {self.found}. Start it with "
            "our plugins (docs/engine.md), of the same release as this worker, and retry."
        )


class EngineNotQualified(PipelineError):
    """Nobody has shown that the engine of a base applies adapters right, or it was shown that it does not."""

    def __init__(self, base: str, engine_id: str, found: str) -> None:
        super().__init__(base, engine_id, found)
        self.base, self.engine_id, self.found = base, engine_id, found

    def __str__(self) -> str:
        return (
            f"engine of base {self.base}: expected a passed qualification of engine {self.engine_id}, found "
            f"{self.found}. Run `roster qualify --base {self.base}`, which measures it, and retry; docs/engine.md says "
            "what its checks mean."
        )


class EngineChanged(PipelineError):
    """The engine was restarted, as another one, between the plan of a scoring and its end."""

    def __init__(self, base: str, expected: str, found: str) -> None:
        super().__init__(base, expected, found)
        self.base, self.expected, self.found = base, expected, found

    def __str__(self) -> str:
        return (
            f"engine of base {self.base}: expected engine {self.expected} throughout, found {self.found}: it was "
            "restarted with other settings meanwhile. These scores are not kept; the next run scores anew."
        )


class LeaseNotGranted(PipelineError):
    """This run did not get the engine for itself."""

    def __init__(self, base: str, limit: str, found: str) -> None:
        super().__init__(base, limit, found)
        self.base, self.limit, self.found = base, limit, found

    def __str__(self) -> str:
        return (
            f"engine of base {self.base}: expected a slot of Prefect's concurrency limit {self.limit}, found: "
            f"{self.found}. Other runs score meanwhile, or the Prefect server is ill; this run is taken up again."
        )


class LeaseLost(PipelineError):
    """The engine's lease could not be renewed while this run scored, so that another may score beside it."""

    def __init__(self, base: str, limit: str) -> None:
        super().__init__(base, limit)
        self.base, self.limit = base, limit

    def __str__(self) -> str:
        return (
            f"engine of base {self.base}: expected to keep the slot of Prefect's concurrency limit {self.limit}, "
            "found that it could not be renewed. These scores are not kept. Is the Prefect server up? "
            "This run is taken up again."
        )


class EngineUnfit(PipelineError):
    """The running engine lacks something that this adapter or the check needs."""

    def __init__(self, base: str, setting: str, expected: str, found: str, advice: str) -> None:
        super().__init__(base, setting, expected, found, advice)
        self.base, self.setting, self.expected, self.found = base, setting, expected, found
        self.advice = advice

    def __str__(self) -> str:
        return (
            f"engine of base {self.base}: {self.setting}: expected {self.expected}, found {self.found}. "
            f"{self.advice}, and retry."
        )


class EngineTooOld(PipelineError):
    """The running engine is a release of vLLM that does not serve such adapters right."""

    def __init__(self, base: str, adapter: str, expected: str, found: str, report: str) -> None:
        super().__init__(base, adapter, expected, found, report)
        self.base, self.adapter, self.expected, self.found = base, adapter, expected, found
        self.report = report

    def __str__(self) -> str:
        return (
            f"engine of base {self.base}: vLLM: expected {self.expected} or newer for {self.adapter}, found "
            f"{self.found}, which refuses it or serves it wrong ({self.report}). Upgrade the engine and retry."
        )


class OpponentGone(PipelineError):
    """A wrong adapter that was chosen for this one is not in the store any more."""

    def __init__(self, adapter: str, opponent: str, key: str) -> None:
        super().__init__(adapter, opponent, key)
        self.adapter, self.opponent, self.key = adapter, opponent, key

    def __str__(self) -> str:
        return (
            f"{self.adapter}: expected {self.key} of its opponent {self.opponent} in the store, found nothing. "
            "The next run chooses opponents anew."
        )


class FilesDamaged(PipelineError):
    """A converted adapter on this disk is not what the ledger says of it."""

    def __init__(self, adapter: str, path: str, refusal: str) -> None:
        super().__init__(adapter, path, refusal)
        self.adapter, self.path, self.refusal = adapter, path, refusal

    def __str__(self) -> str:
        return (
            f"{self.adapter}: the engine would not load {self.path}, whose bytes are not those that the ledger "
            f"records ({self.refusal}). It was removed; the next run fetches it again. Is this disk sound?"
        )


class BaseChanged(PipelineError):
    """The adapter was submitted again, for another base, while it was being judged."""

    def __init__(self, adapter: str, judged: str, submitted: str) -> None:
        super().__init__(adapter, judged, submitted)
        self.adapter, self.judged, self.submitted = adapter, judged, submitted

    def __str__(self) -> str:
        return (
            f"{self.adapter}: expected base {self.judged} to be the one it was last submitted for, found "
            f"{self.submitted}. Nothing is said of it; the run of its last submission judges it."
        )


class OpponentRefused(PipelineError):
    """The engine would not take the control or a wrong adapter, which says nothing of the adapter itself.

    `where` is the engine's name of it: while this engine runs, the next choice of opponents passes it over.
    """

    def __init__(self, adapter: str, where: str, message: str) -> None:
        super().__init__(adapter, where, message)
        self.adapter, self.where, self.message = adapter, where, message

    def __str__(self) -> str:
        return (
            f"{self.adapter}: the engine would not load {self.where}, which it is compared with: {self.message}. "
            "Nothing is said of the adapter; look at the engine's log, then retry."
        )


class NothingPublished(PipelineError):
    """No sync has published a roster yet."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return (
            f"{self.key}: expected the roster in the store, found none: no adapter was ready at any sync. "
            "`roster status` says what is on its way, and `roster sync` publishes what has become ready."
        )


class OtherServer(PipelineError):
    """A server does not serve the base whose adapters it is to get, or it cannot be told which that is."""

    def __init__(self, url: str, expected: str, found: str) -> None:
        super().__init__(url, expected, found)
        self.url, self.expected, self.found = url, expected, found

    def __str__(self) -> str:
        return (
            f"server at {self.url}: expected it to serve {self.expected}, found {self.found}. Name the base with "
            "--base, and start the server with --served-model-name as the base is registered (`roster base add`)."
        )


class StillServed(PipelineError):
    """A server goes on serving adapters that it was told to forget."""

    def __init__(self, url: str, names: str) -> None:
        super().__init__(url, names)
        self.url, self.names = url, names

    def __str__(self) -> str:
        return (
            f"server at {self.url}: expected it to forget {self.names}, found them served still. Start it with "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, without which it takes no orders, and push again."
        )


class NobodyServed(PipelineError):
    """The roster serves no adapter of a base, so there is nothing to compare."""

    def __init__(self, base: str) -> None:
        super().__init__(base)
        self.base = base

    def __str__(self) -> str:
        return (
            f"base {self.base}: expected adapters that the roster serves, found none. `roster status` says what is on "
            "its way, and `roster sync` publishes what has become ready."
        )


class NotServed(PipelineError):
    """An author was named whom the roster does not serve on a base."""

    def __init__(self, author: str, base: str, served: str) -> None:
        super().__init__(author, base, served)
        self.author, self.base, self.served = author, base, served

    def __str__(self) -> str:
        return (
            f"{self.author}: expected an author whom the roster serves on base {self.base}, found only {self.served}. "
            f"`roster why {self.author}` says what became of this one."
        )


class MatrixDrift(PipelineError):
    """The base's scores of one text moved, so that cells measured before and after cannot be compared."""

    def __init__(self, base: str, text: str, expected: str, found: str, advice: str) -> None:
        super().__init__(base, text, expected, found, advice)
        self.base, self.text, self.expected, self.found = base, text, expected, found
        self.advice = advice

    def __str__(self) -> str:
        return (
            f"engine of base {self.base}: expected the {self.expected} bits per byte that the base had on "
            f"{self.text} before, found {self.found}: the engine drifts. {self.advice}"
        )


class EngineDied(PipelineError):
    """The engine ended while it had an adapter, which may or may not be why."""

    def __init__(self, adapter: str, name: str, url: str, found: str, proves: str) -> None:
        super().__init__(adapter, name, url, found, proves)
        self.adapter, self.name, self.url, self.found, self.proves = adapter, name, url, found, proves

    def __str__(self) -> str:
        return (
            f"{self.adapter}: expected the engine at {self.url} to score {self.name}, found that it died meanwhile "
            f"({self.found}). {self.proves}. Its supervisor starts it again, and this run is taken up again."
        )


class AdapterKillsEngine(PipelineError):
    """Engines that have scored a ready adapter on the same text die of this one."""

    def __init__(self, adapter: str, name: str, survivors: str, found: str) -> None:
        super().__init__(adapter, name, survivors, found)
        self.adapter, self.name, self.survivors, self.found = adapter, name, survivors, found

    def __str__(self) -> str:
        return (
            f"{self.adapter}: expected the engine to survive {self.name}, found that two engines died of it "
            f"({self.found}), each freshly started and after it had scored a ready adapter on the same text "
            f"({self.survivors}). Read the engine's log, and report it if vLLM should take such an adapter; submit it "
            "again once that is mended, or force the run on another engine."
        )
