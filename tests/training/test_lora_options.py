"""What the option `lora` may say."""

from __future__ import annotations

import pytest

from ligermodels.errors import ConfigError
from ligermodels.training.lora_options import LoraOptions, parse_lora


def test_it_is_read() -> None:
    assert parse_lora("r=16") == LoraOptions(16, 32.0, 0.0)
    assert parse_lora(" r = 8, alpha=4.5,dropout=0.1 ") == LoraOptions(8, 4.5, 0.1)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "lora: '' cannot be read; expected r, alpha and dropout, as in r=16,"),
        ("16", "lora: '16' cannot be read"),
        ("r=16,rank=3", "lora: 'rank=3' cannot be read"),
        ("r=1,r=2", "lora: 'r=2' cannot be read"),
        ("r=1.5", "lora: r must be a whole number, not '1.5'"),
        ("r=4,alpha=x", "lora: alpha must be a number, not 'x'"),
        ("alpha=3", "lora: r, the rank, must be from 1 to 65536"),
        ("r=0", "lora: r, the rank, must be from 1"),
        ("r=1,alpha=0", "lora: alpha must be more than 0, not 0"),
        ("r=1,alpha=nan", "lora: alpha must be more than 0, not nan"),
        ("r=1,dropout=1", "lora: dropout must be at least 0 and less than 1, not 1"),
    ],
)
def test_refusals(text, message) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        parse_lora(text)
