"""Attribution by bits per byte, its intervals, and the picture: against plain loops and hand-computed values."""

from __future__ import annotations

import base64
import math
import random
import re
from xml.etree import ElementTree

import pytest

from tasks.bpb.attribution import TextScores, attribute, wilson
from tasks.bpb.heatmap import as_data_uri, build_heatmap, draw_heatmap

AUTHORS = ("ash", "bay", "cob", "dyer")
NAN = math.nan


@pytest.mark.parametrize(
    ("right", "total", "lower", "upper"),
    [
        # Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 0.8389, 1.0),
    ],
)
def test_wilson_gives_the_published_intervals(right: int, total: int, lower: float, upper: float) -> None:
    found = wilson(right, total)
    assert (found.lower, found.upper) == (pytest.approx(lower, abs=5e-5), pytest.approx(upper, abs=5e-5))
    assert found.share == right / total


def test_nothing_counted_has_no_share() -> None:
    found = wilson(0, 0)
    assert math.isnan(found.share) and math.isnan(found.lower) and math.isnan(found.upper)


def random_texts(seed: int) -> list[TextScores]:
    """Four sets of different lengths under four adapters, with void units; own is better often, not always."""
    rng = random.Random(seed)
    texts = []
    for number, owner in enumerate(AUTHORS):
        count = 5 + number
        sizes = tuple(rng.randrange(20, 90) for _ in range(count))
        bits = {
            author: tuple(size * rng.uniform(1.6 if author == owner else 1.9, 2.5) for size in sizes)
            for author in AUTHORS
        }
        bits["bay"] = (NAN, *bits["bay"][1:])
        base = (*(2.4 * size for size in sizes[:-1]), NAN)
        texts.append(TextScores(f"{owner}/main", frozenset({owner}), sizes, base, bits))
    return texts


@pytest.mark.parametrize("seed", range(5))
def test_attribution_is_that_of_a_plain_loop(seed: int) -> None:
    texts = random_texts(seed)
    found = attribute(texts, ())
    sets = units = total = 0
    margins = {}
    for text in texts:
        [owner] = text.owners
        kept = range(1, len(text.unit_bytes) - 1)  # the first is void for one adapter, the last for the base
        size = sum(text.unit_bytes[i] for i in kept)
        bpb = {author: sum(bits[i] for i in kept) / size for author, bits in text.adapters.items()}
        [told] = [one for one in found.texts if one.name == text.name]
        assert told.adapters == pytest.approx(bpb) and (told.units, told.byte_count) == (len(kept), size)
        assert told.base == pytest.approx(2.4)
        sets += min(bpb, key=bpb.__getitem__) == owner
        for i in kept:
            total += 1
            units += min(AUTHORS, key=lambda author: text.adapters[author][i]) == owner
        for other in set(AUTHORS) - {owner}:
            taken = sum(text.adapters[other][i] <= text.adapters[owner][i] for i in kept)
            margins[text.name, other] = (pytest.approx(bpb[other] - bpb[owner]), taken)
    assert (found.sets.right, found.sets.total) == (sets, 4)
    assert (found.units.right, found.units.total) == (units, total)
    assert 0 < units < total, "neither all right nor none, or the test would show little"
    assert {(pair.text, pair.other): (pair.margin, pair.taken) for pair in found.pairs} == margins
    assert [pair.margin for pair in found.pairs] == sorted(pair.margin for pair in found.pairs)
    assert found.choices == 4


def text(owners: set[str], **bits: tuple[float, ...]) -> TextScores:
    return TextScores("t", frozenset(owners), (10, 10), (24.0, 24.0), bits)


def test_a_tie_is_not_attributed() -> None:
    found = attribute([text({"ash"}, ash=(20.0, 21.0), bay=(20.0, 22.0))], ())
    assert (found.units.right, found.units.total) == (1, 2)
    found = attribute([text({"ash"}, ash=(20.0, 21.0), bay=(21.0, 20.0))], ())
    assert found.misattributed == ("t",) and found.sets.right == 0
    assert (found.pairs[0].margin, found.pairs[0].taken) == (0.0, 1)


def test_any_owner_is_right_and_kin_are_not_compared() -> None:
    two = text({"ash", "duo"}, ash=(23.0, 21.0), duo=(20.0, 26.0), bay=(22.5, 22.0), pen=(10.0, 10.0))
    found = attribute([two], {frozenset(("ash", "pen"))})
    assert (found.sets.right, found.units.right, found.units.total) == (1, 2, 2)
    assert {(pair.owner, pair.other) for pair in found.pairs} == {("ash", "bay"), ("duo", "bay")}
    assert found.choices == 3
    assert attribute([two], ()).sets.right == 0, "the pen name would have won"


@pytest.mark.parametrize(
    "uncounted",
    [
        text({"ash"}, bay=(20.0, 21.0)),
        text({"ash"}, ash=(20.0, 21.0)),
        text({"ash"}, ash=(20.0, NAN), bay=(NAN, 21.0)),
        text(set(), bay=(20.0, 21.0)),
    ],
    ids=["owner not scored", "no others", "no unit of all", "nobody's"],
)
def test_what_cannot_be_attributed_is_not_counted(uncounted: TextScores) -> None:
    found = attribute([uncounted], ())
    assert (found.sets.total, found.units.total, found.misattributed, found.per_text) == (0, 0, (), {})
    assert math.isnan(found.choices)


def test_an_adapter_that_was_not_scored_on_a_text_costs_it_no_units() -> None:
    """As in a sample: only those who were scored there decide what all could score."""
    whole = text({"ash"}, ash=(20.0, 21.0), bay=(22.0, 22.0))
    found = attribute([whole], ())
    assert found.texts[0].units == 2 and found.texts[0].adapters == {"ash": 2.05, "bay": 2.2}


SVG = "{http://www.w3.org/2000/svg}"


def squares(drawn: str) -> dict[str, int]:
    """How many squares each fill has; frames are counted under `frame`."""
    found: dict[str, int] = {}
    for path in ElementTree.fromstring(drawn).iter(f"{SVG}path"):
        fill = "frame" if path.get("fill") == "none" else str(path.get("fill"))
        found[fill] = len(re.findall("M", str(path.get("d"))))
    return found


def test_the_picture_has_a_colour_for_better_worse_equal_and_missing() -> None:
    bpb = [[2.0, 2.4, None], [2.3, 2.1, 2.6], [2.5, 1.9, 2.0]]
    own = frozenset({(0, 0), (1, 1), (2, 2)})
    heatmap = build_heatmap(["a<b", "bay", "cob"], ["x", "y", "z"], bpb, own)
    flat = [margin for line in heatmap.margins for margin in line]
    assert flat == [
        pytest.approx(one) if one is not None else None
        for one in (0.0, 0.3, None, 0.3, 0.0, 0.6, 0.5, -0.2, 0.0)
    ]
    drawn = draw_heatmap(heatmap, title="t & t")
    found = squares(drawn)
    assert found.pop("frame") == 3
    assert found["#dddddd"] == 1 and found["#f7f7f7"] == 3 and found["#2166ac"] == 1, (
        "missing, own, the worst"
    )
    red = [int(fill[1:3], 16) > int(fill[5:7], 16) for fill in found if fill not in {"#dddddd", "#f7f7f7"}]
    assert red.count(True) == 1 and sum(found.values()) == 9
    words = [element.text for element in ElementTree.fromstring(drawn).iter(f"{SVG}text")]
    assert {"t & t", "a<b", "z"} <= set(words)


def test_an_adapter_that_is_hardly_better_is_seen_all_the_same() -> None:
    own = frozenset({(0, 0)})
    drawn = draw_heatmap(build_heatmap(["a", "b", "c"], ["x"], [[2.0], [1.9999], [2.9]], own), title="t")
    found = squares(drawn)
    assert len(found) == 4, "own, better, worse and the frame"
    [red] = [fill for fill in found if fill not in {"frame", "#f7f7f7", "#2166ac"}]
    assert int(red[1:3], 16) - int(red[5:7], 16) > 60


def test_a_text_without_an_own_adapter_is_not_drawn() -> None:
    heatmap = build_heatmap(["a", "b"], ["x", "y"], [[2.0, 2.4], [2.3, 2.1]], frozenset({(0, 0)}))
    assert heatmap.margins == ((0.0, None), (pytest.approx(0.3), None))


def test_a_hundred_by_a_hundred_stays_small() -> None:
    names = [f"author-{n}" for n in range(100)]
    rng = random.Random(3)
    bpb = [[2.0 if y == x else rng.uniform(2.05, 2.6) for x in range(100)] for y in range(100)]
    heatmap = build_heatmap(names, names, bpb, frozenset((n, n) for n in range(100)))
    drawn = draw_heatmap(heatmap, title="large")
    found = squares(drawn)
    assert found.pop("frame") == 100 and sum(found.values()) == 10_000
    uri = as_data_uri(drawn)
    assert len(uri) < 400_000
    kind, _, body = uri.partition(",")
    assert kind == "data:image/svg+xml;base64" and base64.b64decode(body).decode() == drawn
