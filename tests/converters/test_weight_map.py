import pytest
import torch

from ligermodels.converters.weight_map import (
    Entry,
    Span,
    WeightMap,
)
from ligermodels.errors import ConfigError

SHAPES = {"a": (4, 3), "b": (2, 3)}
LOW, HIGH = Span("s", 0, 0, 2), Span("s", 2, 2, 2)
GOOD = Entry("a", (4, 3), (LOW, HIGH)), Entry("b", (2, 3), (Span("t", 0, 0, 2),))


def test_a_map_that_tiles_passes_the_check():
    WeightMap(GOOD, aliases={"u": "t"}).check("Family", SHAPES)
    # The spans of an entry may be in any order, and one tensor may fill several entries.
    split = Entry("a", (4, 3), (Span("t", 2, 2, 2), Span("t", 0, 0, 2)))
    WeightMap((split, Entry("b", (2, 3), (Span("t", 4, 0, 2),)))).check("Family", SHAPES)


def test_a_map_that_does_not_tile_is_refused_by_family_and_entry(subtests):
    def a(*spans, shape=(4, 3)):
        return Entry("a", shape, spans), GOOD[1]

    for entries, complaint in (
        ((*GOOD, GOOD[1]), "entry 'b' occurs twice"),
        (GOOD[:1], "entry 'b' is missing"),
        ((*GOOD, Entry("bb", (2, 3), (Span("u", 0, 0, 2),))), "'bb': .* nearest is 'b'"),
        (a(LOW, HIGH, shape=(4, 5)), r"'a' has shape \(4, 5\), but the parameter has \(4, 3\)"),
        (a(LOW), "'a': its spans .* they fill 2 of 4 rows"),
        (a(LOW, Span("s", 2, 1, 2)), "rows 1 to 2 are used twice, .* 's'"),
        (a(LOW, Span("s", 2, 3, 1)), "rows 2 to 3 are missing"),
        (a(LOW, HIGH, Span("s", 4, 4, 0)), "has 0 rows"),
        (a(LOW, Span("s", 3, 2, 2)), "'a': each row of the tensor 's' .* rows 2 to 3 are missing"),
        (a(LOW, Span("s", 1, 2, 2)), "rows 1 to 2 are used twice"),
        (a(LOW, Span("t", 0, 2, 2)), "tensor 't' .* rows 0 to 2 are used twice"),
    ):
        with subtests.test(complaint):
            with pytest.raises(ConfigError, match=f"^Family: weight map: .*{complaint}"):
                WeightMap(entries).check("Family", SHAPES)
    wide = Entry("b", (2, 5), (Span("s", 4, 0, 2),))
    with pytest.raises(ConfigError, match=r"'b' takes rows of shape \(5,\) from 's', but .* 'a'"):
        WeightMap((GOOD[0], wide)).check("Family", SHAPES | {"b": (2, 5)})
    single = Entry("b", (), (Span("u", 0, 0, 1),))
    with pytest.raises(ConfigError, match=r"'b': its parameter has no dimension; give it shape"):
        WeightMap((GOOD[0], single)).check("Family", SHAPES | {"b": ()})
    with pytest.raises(ConfigError, match=r"ignored is 'w'; give a tuple"):
        WeightMap(GOOD, ignored="w").check("Family", SHAPES)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="constant 's' is also a source"):
        WeightMap(GOOD, constants={"s": torch.zeros(2)}).check("Family", SHAPES)
    for aliases in ({"t": "s"}, {"u": "v"}):
        with pytest.raises(ConfigError, match="alias"):
            WeightMap(GOOD, aliases=aliases).check("Family", SHAPES)
