"""Read a tokenizer.json with the `tokenizers` package."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ligermodels.errors import first_line, short_repr
from ligermodels.text.tokenizer_config import TokenizerFiles, added_token

if TYPE_CHECKING:
    import tokenizers

NAME = "tokenizer.json"


def read_tokenizer(files: TokenizerFiles) -> "tokenizers.Tokenizer":
    """Return a tokenizer.json, with the added and special tokens of the tokenizer config.

    The post-processor of the file adds bos and eos. As in transformers, `add_bos_token` and
    `add_eos_token` of the config have no effect.

    Raises:
        CheckpointError: the file is damaged, or gives several tokens one id, or the config gives a
            token another id than the file.
    """
    import tokenizers

    content = files.read_json(NAME)
    made = call(files, tokenizers.Tokenizer.from_buffer, files.contents[NAME])
    first: dict[int, str] = {}
    vocab = content["model"].get("vocab")  # In a list, each token's place is its id.
    for token, index in vocab.items() if isinstance(vocab, dict) else ():
        if first.setdefault(index, token) != token:
            raise files.error(
                NAME,
                f"the vocabulary has {short_repr(first[index])} and {short_repr(token)} as "
                f"{index}; give each token its own id",
            )

    def check_id(name: str, token: str, index: int) -> None:
        if (got := made.token_to_id(token)) != index:
            raise files.error(
                name,
                f"the added token {short_repr(token)} has id {index}, but with {NAME} it gets id "
                f"{got}; correct one of the two",
            )

    # A file may have been saved with settings for training: truncation, padding, and dropout,
    # which leaves out merges at random.
    made.no_truncation()
    made.no_padding()
    if getattr(made.model, "dropout", None) is not None:
        made.model.dropout = None
    for entry in content.get("added_tokens") or []:
        check_id(NAME, entry["content"], entry["id"])
    entries = files.added_tokens()
    new = [e for e in entries.values() if made.token_to_id(e["content"]) is None]
    call(files, made.add_tokens, [added_token(entry) for entry in new])
    for index, entry in entries.items():
        check_id("tokenizer_config.json", entry["content"], index)
    special = {x.content for x in made.get_added_tokens_decoder().values() if x.special}
    wanted = dict.fromkeys(files.special_tokens().values())
    call(files, made.add_special_tokens, [token for token in wanted if token not in special])
    return made


def call(files: TokenizerFiles, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function of the package; raise CheckpointError if it fails.

    The package raises a bare Exception for every fault, or it panics: a regular expression takes
    too long, or a file is inconsistent. A panic is not an Exception.
    """
    try:
        return function(*args, **options)
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        problem = f"the package tokenizers cannot use this file: {first_line(error)}"
        raise files.error(NAME, problem) from error
