import pytest
import torch

from ligermodels.converters.weight_map import (
    Entry,
    Span,
    Towers,
    WeightMap,
    linear_entries,
    norm_entries,
    packed_entry,
)
from ligermodels.errors import ConfigError


def test_a_source_that_is_split_among_entries_has_the_size_of_all_its_parts():
    low = Entry("low", (2, 3), (Span("whole", 0, 0, 2),))
    high = Entry("high", (4, 3), (Span("whole", 2, 0, 4),))
    weight_map = WeightMap((high, low))
    assert weight_map.source_shapes() == {"whole": (6, 3)}
    assert [entry.name for entry, _ in weight_map.parts()["whole"]] == ["low", "high"]


def test_the_first_spelling_that_fits_is_replaced():
    towers = Towers(spellings=(("a.b.", "c."), ("a.", "")), left_out=())
    assert [towers.text_name(name) for name in ("a.b.x", "a.x", "b.a.x")] == ["c.x", "x", "b.a.x"]


def test_a_module_has_a_bias_where_it_is_asked_for():
    (weight,) = linear_entries("n", 5, ("a", 2), ("b", 3))
    assert weight == packed_entry("n.weight", (5,), ("a.weight", 2), ("b.weight", 3))
    assert weight.shape == (5, 5)
    bias = packed_entry("n.bias", (), ("a.bias", 2), ("b.bias", 3))
    assert linear_entries("n", 5, ("a", 2), ("b", 3), bias=True) == (weight, bias)
    weight = packed_entry("n.weight", (), ("hf.n.weight", 4))
    bias = packed_entry("n.bias", (), ("hf.n.bias", 4))
    assert norm_entries("n", "hf.n", 4) == (weight,)
    assert norm_entries("n", "hf.n", 4, bias=True) == (weight, bias)


SHAPES = {"a": (4, 3), "b": (2, 3)}
LOW, HIGH = Span("s", 0, 0, 2), Span("s", 2, 2, 2)
GOOD = Entry("a", (4, 3), (LOW, HIGH)), Entry("b", (2, 3), (Span("t", 0, 0, 2),))


def test_a_map_that_tiles_passes_the_check():
    WeightMap(GOOD, aliases={"u": "t"}).check("Family", SHAPES)
    # The spans of an entry may be in any order, and one tensor may fill several entries.
    split = Entry("a", (4, 3), (Span("t", 2, 2, 2), Span("t", 0, 0, 2)))
    WeightMap((split, Entry("b", (2, 3), (Span("t", 4, 0, 2),)))).check("Family", SHAPES)


def test_a_constant_that_is_also_a_source_is_refused() -> None:
    entry = packed_entry("a", (), ("hf.a", 2))
    table = WeightMap((entry,), constants={"hf.a": torch.zeros(2)})
    with pytest.raises(ConfigError, match=r"Own: weight map: constant 'hf\.a' is also a source"):
        table.check("Own", {"a": (2,)})


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
    for aliases in ({"t": "s"}, {"u": "v"}):
        with pytest.raises(ConfigError, match="alias"):
            WeightMap(GOOD, aliases=aliases).check("Family", SHAPES)
