from ligermodels.converters.weight_map import (
    Entry,
    Span,
    Towers,
    WeightMap,
    linear_entries,
    norm_entries,
    packed_entry,
)


def test_a_source_that_is_split_among_entries_has_the_size_of_all_its_parts():
    low = Entry("low", (2, 3), (Span("whole", 0, 0, 2),))
    high = Entry("high", (4, 3), (Span("whole", 2, 0, 4),))
    weight_map = WeightMap((high, low))
    assert weight_map.source_shapes() == {"whole": (6, 3)}
    assert [entry.name for entry, _ in weight_map.parts()["whole"]] == ["low", "high"]


def test_the_first_spelling_that_fits_is_replaced():
    towers = Towers(spellings=(("a.b.", "c."), ("a.", "")), left_out=())
    assert [towers.text_name(name) for name in ("a.b.x", "a.x", "b.a.x")] == ["c.x", "x", "b.a.x"]


def test_packed_stacks_rows():
    assert packed_entry("n", (5,), ("a", 2), ("b", 3)).shape == (5, 5)


def test_a_linear_has_a_bias_where_it_is_asked_for():
    (weight,) = linear_entries("n", 5, ("a", 2), ("b", 3))
    assert weight == packed_entry("n.weight", (5,), ("a.weight", 2), ("b.weight", 3))
    assert linear_entries("n", 5, ("a", 2), ("b", 3), bias=True) == (
        weight,
        packed_entry("n.bias", (), ("a.bias", 2), ("b.bias", 3)),
    )


def test_a_norm_has_a_bias_where_it_is_asked_for():
    weight = packed_entry("n.weight", (), ("hf.n.weight", 4))
    bias = packed_entry("n.bias", (), ("hf.n.bias", 4))
    assert norm_entries("n", "hf.n", 4) == (weight,)
    assert norm_entries("n", "hf.n", 4, bias=True) == (weight, bias)
