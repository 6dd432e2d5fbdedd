"""Suggestions for misspelt words."""

from ligermodels.cli.suggestions import did_you_mean

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
            assert did_you_mean(word, OPTIONS) == f"; did you mean {found!r}?"
    assert did_you_mean("fintune", ["finetune", "generate"]) == "; did you mean 'finetune'?"


def test_nothing_close_suggests_nothing():
    for word in ("--xyz", "", "-", "--"):
        assert did_you_mean(word, OPTIONS) == ""
    assert did_you_mean("a", []) == ""
