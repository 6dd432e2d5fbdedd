import pytest

from ligermodels import errors


def test_listing_stops_at_ten_and_counts_the_rest() -> None:
    assert errors.listing(["a", "b"]) == "  a\n  b"
    lines = errors.listing(f"name{i}" for i in range(13)).splitlines()
    assert lines[:10] == [f"  name{i}" for i in range(10)]
    assert lines[10:] == ["  ... and 3 more"]


OPTIONS = ("--help", "--learning-rate", "--num-train-epochs", "--batch-size", "--max-new-tokens")
ARGUMENTS = ("inputs_embeds", "prefix_lengths", "max_new_tokens", "eos_token_id", "top_p", "top_k")
MODULES = ("layers.0.mlp", "layers.0.self_attn")


@pytest.mark.parametrize(
    ("known", "given"),
    [
        (OPTIONS, {"--rate": "--learning-rate", "-help": "--help"}),
        (OPTIONS, {"--epochs": "--num-train-epochs", "--learnig-rate": "--learning-rate"}),
        (ARGUMENTS, {"max_length": "max_new_tokens", "input_embeds": "inputs_embeds"}),
        (MODULES, {"layers.0.mpl": "layers.0.mlp"}),
        # What is not near in meaning is not suggested.
        (OPTIONS, dict.fromkeys(("--xyz", "", "-", "--"))),
        (ARGUMENTS, dict.fromkeys(("num_beams", "min_new_tokens", "min_p", "lengths_penalty"))),
        (MODULES, {"layers.9.mlp": None}),
    ],
)
def test_what_is_near_in_meaning_is_suggested(
    known: tuple[str, ...], given: dict[str, str | None]
) -> None:
    for word, found in given.items():
        expected = "" if found is None else f"; did you mean {found!r}?"
        assert errors.did_you_mean(word, known) == expected, word
