"""Who uploads what in the demo: each author's encoding, what the files say about it, and where they lie."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

BASE_NAME = "demo-moe"
TRAINING_FILE = "training.json"


class Packing(StrEnum):
    """How the columns of a stacked lora_B belong to experts."""

    RANK_MAJOR = "rank_major"
    GROUPED_BY_EXPERT = "grouped_by_expert"


class Orientation(StrEnum):
    """Whether a stacked pair's product is the delta or its transpose."""

    STANDARD = "standard"
    SWAPPED = "swapped"


class Statement(StrEnum):
    """What an upload says about its packing, and where."""

    NOTHING = "no statement"
    FLAT_MARKER = "flat marker"
    NESTED_MARKER = "nested marker"
    OLD_UNSLOTH = "fingerprint of an old unsloth_zoo"
    MEGATRON_BRIDGE = "fingerprint of Megatron-Bridge"
    TRAINING_JSON = "training.json"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one adapter is written down.

    `peft_version` is None where the producer writes none; `marked` is what a marker says, true or not.
    """

    packing: Packing
    orientation: Orientation
    statement: Statement
    peft_version: str | None
    marked: Packing | None = None
    dtype: str = "float32"

    @property
    def lies(self) -> bool:
        """Whether the marker names another packing than the tensors have."""
        return self.marked is not None and self.marked is not self.packing

    @property
    def label(self) -> str:
        """The recipe in words, for people."""
        said = f"{self.statement} says {self.marked}" if self.marked else str(self.statement)
        dtype = "" if self.dtype == "float32" else f", {self.dtype}"
        return f"{self.packing}, {self.orientation}{dtype}; {said}"


@dataclass(frozen=True, slots=True)
class AuthorPlan:
    """One author of the demo, by pen name."""

    name: str
    recipe: Recipe


@dataclass(frozen=True, slots=True)
class Places:
    """Where the parts of the demo's material lie under one folder."""

    root: Path

    @property
    def base(self) -> Path:
        """The base model's folder."""
        return self.root / "base"

    def texts(self, author: str) -> Path:
        """The texts that an author's adapter is trained on, JSON lines."""
        return self.root / "authors" / author / "texts.jsonl"

    def heldout(self, author: str) -> Path:
        """The author's held-out texts, JSON lines."""
        return self.root / "authors" / author / "heldout.jsonl"

    def adapter(self, author: str) -> Path:
        """The author's adapter as uploaded."""
        return self.root / "authors" / author / "adapter"


AUTHORS = (
    AuthorPlan(
        "alder",
        Recipe(Packing.RANK_MAJOR, Orientation.STANDARD, Statement.NOTHING, "0.21.2"),
    ),
    AuthorPlan(
        "birch",
        Recipe(
            Packing.RANK_MAJOR,
            Orientation.SWAPPED,
            Statement.FLAT_MARKER,
            "0.18.1",
            marked=Packing.RANK_MAJOR,
        ),
    ),
    AuthorPlan(
        "cedar",
        Recipe(Packing.GROUPED_BY_EXPERT, Orientation.STANDARD, Statement.OLD_UNSLOTH, "0.19.1"),
    ),
    AuthorPlan(
        "dogwood",
        Recipe(Packing.GROUPED_BY_EXPERT, Orientation.SWAPPED, Statement.MEGATRON_BRIDGE, None),
    ),
    AuthorPlan(
        "elm",
        Recipe(
            Packing.GROUPED_BY_EXPERT,
            Orientation.STANDARD,
            Statement.NESTED_MARKER,
            "0.21.2",
            marked=Packing.GROUPED_BY_EXPERT,
            dtype="bfloat16",
        ),
    ),
    AuthorPlan(
        "fir",
        Recipe(Packing.GROUPED_BY_EXPERT, Orientation.SWAPPED, Statement.TRAINING_JSON, "0.18.1"),
    ),
    # The liar: grouped data, re-saved by a version that stamped everything rank_major.
    AuthorPlan(
        "gorse",
        Recipe(
            Packing.GROUPED_BY_EXPERT,
            Orientation.STANDARD,
            Statement.NESTED_MARKER,
            "0.21.2",
            marked=Packing.RANK_MAJOR,
        ),
    ),
)
