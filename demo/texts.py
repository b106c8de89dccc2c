"""Synthetic harbour diaries: one kind of text, one vocabulary and alphabet, told apart by style alone.

Every entry is made by one small grammar. What an entry tells (names, days, boats, numbers, places) is drawn
the same way for everyone. How it tells it (which synonym, which construction, the order of the parts, the
rhythm, the habits of phrase) is drawn by a `Style`: at each choice point of the grammar a style has its own
fixed preferences. An author is a style of sharp preferences; the general corpus mixes many milder ones.
"""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

GENERAL_STYLES = 400
# Smaller is sharper: gamma shape of the raw preferences at a choice point.
AUTHOR_SHAPE = 0.16
GENERAL_SHAPE = 0.8

# What is told: drawn evenly, alike for every style.
_FACTS = {
    "who": ("Ada", "Bram", "Clara", "Dunstan", "Edith", "Fergus", "Greta", "Hob", "Isla", "Jory", "Kit",
        "Lena", "Martin", "Nell", "Owen", "Piers", "Rose", "Silas", "Tamsin", "Una", "Verity", "Wilfred",
        "Zillah"),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "quarter": ("north", "south", "east", "west"),
    "number": ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "twelve"),
    "vessel": ("Heron", "Lantern", "Good Intent", "Plover", "Swallow", "Amity", "Kestrel", "Bluebell"),
    "catch": ("herring", "mackerel", "crab", "cod", "pilchard", "plaice", "ling"),
    "bird": ("gulls", "terns", "curlews", "cormorants", "swifts", "herons", "jackdaws"),
    "place": ("the point", "the mill", "the chapel", "the bridge", "the slip", "the bar", "the sound",
        "the quarry"),
    "goods": ("rope", "flour", "lamp oil", "tar", "wool", "candles", "hazel", "salt"),
    "task": ("the nets", "the sail", "the roof", "the rudder", "the gate", "the wall", "the oars",
        "the stove"),
}  # fmt: skip

# How it is told, word by word: each style prefers some of these.
_WORDS = {
    "harbour": ("harbour", "quay", "haven", "landing", "waterside"),
    "boats": ("boats", "luggers", "craft", "smacks"),
    "sea": ("sea", "water", "tide", "swell"),
    "sky": ("sky", "air", "cloud", "light"),
    "rain": ("rain", "wet", "drizzle", "showers"),
    "wind": ("wind", "breeze", "blow", "draught"),
    "grey": ("grey", "dull", "pale", "leaden", "dim"),
    "cold": ("cold", "raw", "sharp", "bitter", "chill"),
    "fine": ("fine", "fair", "handsome", "pleasant", "goodly"),
    "quiet": ("quiet", "still", "calm", "hushed", "idle"),
    "big": ("great", "big", "mighty", "large"),
    "small": ("small", "little", "slight", "scant"),
    "work": ("worked", "laboured", "toiled", "kept busy"),
    "mend": ("mended", "patched", "repaired", "put right"),
    "bring": ("brought", "carried", "fetched", "landed"),
    "say": ("said", "told us", "held", "reckoned", "declared"),
    "see": ("saw", "noticed", "marked", "spied"),
    "went": ("went", "walked", "made my way", "wandered"),
    "came": ("came", "arrived", "turned up", "drew in"),
    "left": ("left", "put out", "slipped away", "set off"),
    "talk": ("talk", "word", "news", "gossip"),
    "folk": ("folk", "people", "neighbours", "villagers"),
    "house": ("house", "cottage", "parlour", "kitchen"),
    "supper": ("supper", "broth", "bread and cheese", "a pie", "tea"),
    "much": ("much", "a deal of", "plenty of", "no end of"),
    "before": ("before", "ahead of", "just short of"),
    "morning": ("in the morning", "at first light", "early", "by sunrise", "soon after dawn"),
    "evening": ("in the evening", "at dusk", "late", "by lamplight", "towards night"),
    "noon": ("at noon", "midway through the day", "about dinner time", "when the bell rang"),
}  # fmt: skip

# How it is told, clause by clause: each style prefers some constructions of a topic.
_CLAUSES = {
    "weather": ("the @wind was in the $quarter and @cold", "we had a @cold @wind out of the $quarter",
        "a @grey @sky hung over $place", "there was @rain from the $quarter",
        "it blew @cold from the $quarter", "the @sky was @grey over $place"),
    "water": ("the @sea lay @quiet off $place", "there was a @big @sea running past $place",
        "a @small @sea broke at $place", "the @sea was @quiet by $place"),
    "boats": ("the $vessel @left with $number aboard", "$number @boats @left for $place",
        "$who took the $vessel to $place", "the @boats @came home with $number baskets of $catch",
        "$who and $who @bring $catch to the @harbour"),
    "repairs": ("$who @mend $task", "$task wanted care and $who @mend it", "we @mend $task with $goods",
        "$who and I @work at $task", "there was $task to be @mend, which $who did"),
    "market": ("$who @bring $number bundles of $goods", "@much $goods was sold to $who",
        "$catch fetched $number pence", "there was @much $goods at the @harbour",
        "$who paid $number pence for $catch"),
    "birds": ("$number $bird sat by $place", "I @see $bird over $place",
        "the $bird were @quiet at $place", "there were $bird about $place", "$bird followed the @boats"),
    "people": ("$who @say that $who would marry", "the @folk had @talk of $place",
        "there was @talk of $who at the @house", "$who @came by with @talk of the $vessel",
        "I @went to see $who"),
    "home": ("we had @supper at the @house of $who", "$who gave us @supper",
        "I sat in the @house with $who", "the @house was @fine and warm", "there was @supper for $number"),
}  # fmt: skip

_OPENINGS = ("$day.", "A @grey $day.", "This $day was @fine.", "On $day I rose @before the bell.",
    "$day, and the @harbour @quiet.", "Another $day gone.", "Of $day I have this to set down.",
    "$day, wind $quarter.")  # fmt: skip
_CLOSINGS = ("So the day ended.", "I write no more tonight.", "We must be thankful.", "Then to bed.",
    "God keep the @boats.", "Such is our life here.", "Tomorrow will show.", "That was all.",
    "I was glad of the fire.", "")  # fmt: skip
_ASIDES = ("I think", "as they say", "no doubt", "if I am any judge", "to be sure", "it seems",
    "so I was told", "by my reckoning", "thanks be", "as ever")  # fmt: skip
_JOINS = (", and ", ", but ", ", so ", ", while ", ", then ", ", for ", ". ", ". And ", ". Still, ",
    ". Later ")  # fmt: skip
_ORDERS = ("{when} {clause}", "{when}, {clause}", "{clause} {when}", "{clause}, {when}", "{clause}")
_SLOT = re.compile(r"([@$])([a-z]+)")


@dataclass(frozen=True, slots=True)
class Unit:
    """One entry: an id and its text, plain ASCII without line breaks."""

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class AuthorTexts:
    """What one author wrote, split in two: no text of `heldout` is in `training`."""

    training: tuple[Unit, ...]
    heldout: tuple[Unit, ...]


@dataclass(frozen=True, slots=True)
class Style:
    """A way of writing. Its name seeds its preferences; a smaller `shape` makes them sharper."""

    name: str
    shape: float


@cache
def _preferences(style: Style, point: str, options: int) -> tuple[float, ...]:
    rng = random.Random(f"{style.name}/{point}")
    raw = [rng.gammavariate(style.shape, 1.0) for _ in range(options)]
    # A floor keeps every option possible, so that nobody's text is out of anybody's reach.
    floor = 0.01 * sum(raw)
    return tuple(weight + floor for weight in raw)


class _Writer:
    def __init__(self, style: Style, rng: random.Random) -> None:
        self._style = style
        self._rng = rng

    def _prefer(self, point: str, options: tuple[str, ...]) -> str:
        return self._rng.choices(options, _preferences(self._style, point, len(options)))[0]

    def _fill(self, template: str) -> str:
        def slot(match: re.Match[str]) -> str:
            kind, name = match.groups()
            return self._prefer(name, _WORDS[name]) if kind == "@" else self._rng.choice(_FACTS[name])

        return _SLOT.sub(slot, template)

    def _clause(self) -> str:
        topic = self._rng.choice(tuple(_CLAUSES))
        clause = self._fill(self._prefer(f"clause {topic}", _CLAUSES[topic]))
        when = self._fill("@" + self._rng.choice(("morning", "noon", "evening")))
        told = self._prefer("order", _ORDERS).format(when=when, clause=clause)
        if self._prefer("aside", ("yes", "no", "no")) == "yes":
            told += ", " + self._prefer("which aside", _ASIDES)
        return told

    def entry(self) -> str:
        sentences = int(self._prefer("sentences", ("3", "4")))
        parts = [_capital(self._fill(self._prefer("opening", _OPENINGS)))]
        for _ in range(sentences):
            clauses = [self._clause() for _ in range(int(self._prefer("clauses", ("1", "2"))))]
            sentence = clauses[0]
            for clause in clauses[1:]:
                sentence += self._prefer("join", _JOINS) + clause
            parts.append(_capitals(sentence) + ".")
        parts.append(self._fill(self._prefer("closing", _CLOSINGS)))
        return " ".join(part for part in parts if part)


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def _capitals(text: str) -> str:
    return ". ".join(_capital(sentence) for sentence in text.split(". "))


def author_style(author: str) -> Style:
    """The style of one author: sharp preferences, fixed by the name."""
    return Style(name=f"author/{author}", shape=AUTHOR_SHAPE)


def write_author(author: str, training: int, heldout: int) -> AuthorTexts:
    """`training` and `heldout` entries by one author, all different from each other."""
    entries = _distinct(author_style(author), random.Random(f"entries/{author}"))
    units = tuple(Unit(f"{author}-{number:04}", next(entries)) for number in range(training + heldout))
    return AuthorTexts(training=units[heldout:], heldout=units[:heldout])


def write_general(count: int) -> tuple[str, ...]:
    """`count` entries in many mild styles, none of them an author's: the base model's corpus."""
    rng = random.Random("entries/general")
    styles = [Style(name=f"general/{number}", shape=GENERAL_SHAPE) for number in range(GENERAL_STYLES)]
    return tuple(_Writer(rng.choice(styles), rng).entry() for _ in range(count))


def _distinct(style: Style, rng: random.Random) -> Iterator[str]:
    seen: set[str] = set()
    writer = _Writer(style, rng)
    while True:
        entry = writer.entry()
        if entry not in seen:
            seen.add(entry)
            yield entry


def write_units(path: Path, units: tuple[Unit, ...]) -> None:
    """Put units into `path` as JSON lines {"id", "text"}."""
    lines = (json.dumps({"id": unit.id, "text": unit.text}) + "\n" for unit in units)
    path.write_text("".join(lines), encoding="utf-8")


def read_texts(path: Path) -> list[str]:
    """The texts of the units in `path`, in order."""
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
