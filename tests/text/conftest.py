import json

import pytest
import tokenizers

from tests.text.folders import LINES


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A folder with a byte-level BPE tokenizer, as in Llama 3 and SmolLM2."""
    folder = tmp_path_factory.mktemp("bpe")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>", "<|im|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(LINES, trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    made.enable_truncation(4)
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory):
    """A folder with a tokenizer that marks the beginnings of words and falls back to bytes.

    So are those of Llama 2, with a token before a text, and here also one after it.
    """
    folder = tmp_path_factory.mktemp("metaspace")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    decoders = tokenizers.decoders
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=100,
        special_tokens=["<unk>", "<s>", "</s>", "<|im|>"],
        show_progress=False,
    )
    made.train_from_iterator(LINES, trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    content = json.loads(made.to_str())
    vocab = content["model"]["vocab"]
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder
