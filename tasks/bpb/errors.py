"""What can go wrong while adapters are scored, the engine's own errors apart. Each error keeps its facts."""

from __future__ import annotations


class BpbError(Exception):
    """The parent of every error of the BPB check that is not the engine's."""


class HeldoutUnusable(BpbError):
    """The held-out text has no unit that can be scored."""

    def __init__(self, units: int, reasons: tuple[str, ...]) -> None:
        super().__init__(units, reasons)
        self.units = units
        self.reasons = reasons

    def __str__(self) -> str:
        why = "; ".join(self.reasons[:3]) or "the set is empty"
        return (
            f"held-out text: expected at least one unit with text to score, found none among {self.units} "
            f"({why}). Register a held-out set with texts of this author."
        )


class DuplicateUnit(BpbError):
    """Two units share an id, so scores could not be paired."""

    def __init__(self, unit_id: str) -> None:
        super().__init__(unit_id)
        self.unit_id = unit_id

    def __str__(self) -> str:
        return (
            f"held-out text: unit id {self.unit_id!r} occurs twice, expected each id once, since scores are "
            "paired by id. Give the units different ids and register the set again."
        )


class TokenizerUnsupported(BpbError):
    """The tokenizer puts something other than one token, or nothing, before a text."""

    def __init__(self, with_special: tuple[int, ...], without_special: tuple[int, ...]) -> None:
        super().__init__(with_special, without_special)
        self.with_special = with_special
        self.without_special = without_special

    def __str__(self) -> str:
        return (
            f"tokenizer: the probe text gives {list(self.with_special)} with special tokens and "
            f"{list(self.without_special)} without; expected the second to stand in the first after at most "
            "one BOS token. Serve this base with a tokenizer that adds one BOS or none."
        )


class WindowInvalid(BpbError):
    """The window and the stride leave a token without context."""

    def __init__(self, max_len: int, stride: int, scored_from: int) -> None:
        super().__init__(max_len, stride, scored_from)
        self.max_len = max_len
        self.stride = stride
        self.scored_from = scored_from

    def __str__(self) -> str:
        return (
            "windows: expected 1 <= stride < window and a first scored token that is not token 0, found "
            f"stride {self.stride}, window {self.max_len}, first scored token {self.scored_from}. The window "
            "is the engine's max_model_len - 1: start the engine with a longer one, or set a shorter stride."
        )


class SubjectsInvalid(BpbError):
    """The subjects are not one base, one own and at most one control beside the wrong ones."""

    def __init__(self, labels: tuple[str, ...], problem: str) -> None:
        super().__init__(labels, problem)
        self.labels = labels
        self.problem = problem

    def __str__(self) -> str:
        return (
            f"subjects {', '.join(self.labels) or 'none'}: {self.problem}; expected base, own, at most one "
            "control, and wrong:<author> for each opponent, each with its own model name. Correct the caller."
        )


class MeasurementVoid(BpbError):
    """The engine gave nothing that can be used for the bare base, or lost count of the prompts."""

    def __init__(self, model: str, units: int, reason: str) -> None:
        super().__init__(model, units, reason)
        self.model = model
        self.units = units
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"{self.model}: expected a finite log-probability for each token of {self.units} units; found: "
            f"{self.reason}. This is the engine's fault, not the adapter's: restart the engine and score "
            "again."
        )


class EngineUnsteady(BpbError):
    """The engine answered one prompt in two ways, so that its answers depend on what else it was asked."""

    def __init__(self, model: str, unit: str, first: str, again: str) -> None:
        super().__init__(model, unit, first, again)
        self.model = model
        self.unit = unit
        self.first = first
        self.again = again

    def __str__(self) -> str:
        return (
            f"{self.model}: unit {self.unit}: expected one answer to one prompt, found first {self.first}, and "
            f"asked again {self.again}. No score of such an engine is kept: start it with "
            "--no-enable-prefix-caching, look into its log, and score again."
        )


class ThresholdsInvalid(BpbError):
    """A threshold is not a number that can decide anything."""

    def __init__(self, name: str, value: float, expected: str) -> None:
        super().__init__(name, value, expected)
        self.name = name
        self.value = value
        self.expected = expected

    def __str__(self) -> str:
        return f"threshold {self.name}: expected {self.expected}, found {self.value}. Correct the setting."
