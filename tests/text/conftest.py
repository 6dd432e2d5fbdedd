import pytest
import tokenizers

from tests.text.folders import LINES, train_sentencepiece


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
def spm(tmp_path_factory):
    """A folder with a sentencepiece model."""
    folder = tmp_path_factory.mktemp("spm")
    train_sentencepiece(folder)
    return folder
