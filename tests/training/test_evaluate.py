"""The loss on files equals that of the logits, whatever the rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ligermodels import AutoLiger
from ligermodels.errors import ConfigError, DataError, LigerError
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.training.evaluate import FileLoss, file_loss
from tests.training.tiny_run import make_checkpoint


def test_the_loss_is_that_of_the_logits(checkpoint, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("the cat\n\na dog saw a cat")
    model, tokenizer = AutoLiger.from_hf(checkpoint).double(), Tokenizer.from_hf(checkpoint)
    total, count = 0.0, 0
    for text in ("the cat", "a dog saw a cat"):
        ids = torch.tensor([[*tokenizer.encode(text, add_special_tokens=False), 257]])
        with torch.no_grad():
            logits = model.head.logits(model(ids))
        total += F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    found = file_loss(model, tokenizer, [file], separator="", batch_size=1)
    assert found.loss == pytest.approx(total / count, rel=1e-9) and found.targets == count
    assert found.tokens == count + 2 and model.training
    for layer in model.layers:  # what layers add to a training loss does not count
        forward = layer.forward
        layer.forward = lambda *args, forward=forward: (*forward(*args), torch.tensor(0.5))
    again = file_loss(model, tokenizer, [file], separator="", seq_len=17)
    assert again.loss == pytest.approx(found.loss, rel=1e-9)


def test_losses_of_files_add_up_by_targets():
    both = FileLoss(10.0, 10, 20, 0.5, 1) + FileLoss(20.0, 5, 6, 0.5, 2)
    assert both == FileLoss(30.0, 15, 26, 1.0, 3)
    assert both.to_dict()["perplexity"] == pytest.approx(7.389, rel=1e-3)


def test_what_cannot_be_measured_is_refused(checkpoint, text, tmp_path):
    tokenizer = Tokenizer.from_hf(checkpoint)
    with pytest.raises(DataError, match="the file is missing"):
        file_loss(AutoLiger.from_hf(checkpoint), tokenizer, [tmp_path / "none.txt"])
    small = make_checkpoint(
        tmp_path / "small", vocab_size=250, eos_token_id=None, bos_token_id=None
    )
    with pytest.raises(ConfigError, match="the tokenizer makes token 257"):
        file_loss(AutoLiger.from_hf(small), tokenizer, [text])


def test_a_model_without_finite_logits_has_no_loss(checkpoint, text):
    model = AutoLiger.from_hf(checkpoint)
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    with pytest.raises(LigerError, match=r"words\.txt: the loss is nan: .* try another dtype"):
        file_loss(model, Tokenizer.from_hf(checkpoint), [text])
