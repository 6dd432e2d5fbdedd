import pytest

from ligermodels import errors


def test_each_error_is_ours_and_the_builtin_kind(subtests):
    for error, builtin in (
        (errors.ConfigError, ValueError),
        (errors.CheckpointError, ValueError),
        (errors.SaveError, OSError),
    ):
        with subtests.test(error.__name__):
            with pytest.raises(builtin, match="what went wrong"):
                raise error("what went wrong")
            assert issubclass(error, errors.LigerError)
            assert str(error("a message")) == "a message"


def test_listing_stops_at_ten_and_counts_the_rest():
    assert errors.listing(["a", "b"]) == "  a\n  b"
    lines = errors.listing(f"name{i}" for i in range(13)).splitlines()
    assert lines[:10] == [f"  name{i}" for i in range(10)]
    assert lines[10:] == ["  ... and 3 more"]


OPTIONS = ["--help", "--learning-rate", "--num-train-epochs", "--batch-size", "--max-new-tokens"]


def test_a_close_word_is_suggested(subtests):
    for word, found in (
        ("--lr", "--learning-rate"),
        ("--bs", "--batch-size"),
        ("--epochs", "--num-train-epochs"),
        ("--learnig-rate", "--learning-rate"),
        ("--batchsize", "--batch-size"),
        ("-help", "--help"),
    ):
        with subtests.test(word):
            assert errors.did_you_mean(word, OPTIONS) == f"; did you mean {found!r}?"
    for word, found in (
        ("max_length", "max_new_tokens"),
        ("max_new_tokesn", "max_new_tokens"),
        ("input_embeds", "inputs_embeds"),
    ):
        assert errors.did_you_mean(word, GENERATE) == f"; did you mean {found!r}?"
    assert errors.did_you_mean("layers.0.mpl", ["layers.0.mlp"]) == "; did you mean 'layers.0.mlp'?"
    assert errors.did_you_mean("fintune", ["finetune", "generate"]) == "; did you mean 'finetune'?"


GENERATE = ("inputs_embeds", "prefix_lengths", "max_new_tokens", "eos_token_id", "top_p", "top_k")


def test_nothing_near_in_meaning_suggests_nothing():
    for word in ("--xyz", "", "-", "--"):
        assert errors.did_you_mean(word, OPTIONS) == ""
    for word in ("num_beams", "min_new_tokens", "bos_token_id", "min_p", "lengths_penalty"):
        assert errors.did_you_mean(word, GENERATE) == "", word
    assert errors.did_you_mean("layers.9.mlp", ["layers.0.mlp"]) == ""
    assert errors.did_you_mean("a", []) == ""
