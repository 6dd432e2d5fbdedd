import pytest

from ligermodels.text import TextStream, Tokenizer
from ligermodels.text.streaming import until
from tests.text.folders import CONFIG, configure

# The first ids have no text, so that only the last ones can keep the space before a word.
MARKED = "<|im|>" * 9 + "the fox the dog"


@pytest.mark.parametrize("kind", ["bpe", "metaspace"])
def test_streamed_text_is_the_decoded_text(kind, request, tmp_path):
    _, ours = configure(request.getfixturevalue(kind), tmp_path, **CONFIG)
    for text in [
        "the quick  brown 😀é€ fox, 東京 <|im|> dog",
        "😀😀",
        " x",
        "a<|im|><|im|> b",
        MARKED,
    ]:
        ids = ours.encode(text)
        stream = TextStream(ours)
        pieces = [stream.push(i) for i in ids]
        assert all("\ufffd" not in piece for piece in pieces)
        assert "".join(pieces) + stream.finish() == ours.decode(ids)
        for context in range(1, len(ids)):
            before = ours.decode(ids[:context])
            stream = TextStream(ours, ids[:context])
            rest = "".join(map(stream.push, ids[context:])) + stream.finish()
            assert before + rest == ours.decode(ids) or before.endswith("\ufffd")


def test_a_character_that_never_ends_comes_out_at_the_end(bpe):
    ours = Tokenizer.from_hf(bpe)
    ids = ours.encode("a😀", add_special_tokens=False)
    stream = TextStream(ours)
    assert [stream.push(i) for i in ids[:-1]] == ["a", *[""] * (len(ids) - 2)]
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


@pytest.mark.parametrize("size", [1, 2, 5, 20])
def test_a_text_ends_before_a_string(size):
    """Nothing of a string comes out, however the text is cut into pieces; all else does."""
    text = "a cat and a dog and a cow"
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert "".join(until(pieces, ["dog and", "and a cow"])) == "a cat and a "
    assert "".join(until(pieces, ["and a dogs"])) == text
    assert list(until(pieces, [])) == pieces
