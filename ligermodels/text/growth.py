"""Bound how much longer a text can become while a tokenizer works on it.

A tokenizer file can hold a bomb: forty steps that each replace `a` by `aa` turn one letter into
2**40. The libraries cannot be stopped while they do that, so their files are refused beforehand.
"""

import base64
import binascii
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ligermodels.errors import CheckpointError

# Normalizers of ordinary models stay below 100: NFKC makes up to 18 letters of one.
MAX_GROWTH = 10_000
_ORDINARY = 64
_MAX_LENGTH = 100_000_000
_OF_TYPE = {"NFKC": 18, "NFKD": 18, "NFC": 3, "NFD": 4, "Lowercase": 3, "ByteLevel": 4}
_OF_TYPE |= {"BertNormalizer": 12, "WordPiece": 2, "CTC": 2}
# Steps whose growth depends on the values of these keys.
_KEYS = {
    "Sequence": ("normalizers", "decoders", "processors"),
    "Replace": ("pattern",),
    "Prepend": ("prepend",),
    "Precompiled": ("precompiled_charsmap",),
    "TemplateProcessing": ("single",),
}


def growth_of(step: Any) -> float:
    """Return how many times longer the steps of a tokenizer.json can make a text.

    Args: step is a normalizer, a decoder or a post-processor, or None.
    """
    if not isinstance(step, Mapping):
        return 1
    kind = step.get("type")
    if isinstance(kind, str) and kind in _OF_TYPE:
        return _OF_TYPE[kind]
    if isinstance(kind, str) and kind in _KEYS:
        return _growth_as(kind, step)
    # The library takes a step of an unknown type, or without one, for what its other keys fit.
    fitting = [kind for kind, keys in _KEYS.items() if not step.keys().isdisjoint(keys)]
    return max([1, *(_growth_as(kind, step) for kind in fitting)])


def _growth_as(kind: str, step: Mapping[str, Any]) -> float:
    """Return the growth of a step of this type."""
    match kind:
        case "Sequence":
            inner = (step.get(f"{kind}s") for kind in ("normalizer", "decoder", "processor"))
            return math.prod(growth_of(each) for steps in inner for each in steps or ())
        case "Replace":
            found, put = step["pattern"].get("String"), len(step["content"])
            # An empty match is before each letter, and one is at the end.
            return max(1, put / len(found)) if found else 1 + 2 * put
        case "Prepend":
            return 1 + len(step["prepend"])
        case "Precompiled":
            try:
                return growth_of_charsmap(base64.b64decode(step["precompiled_charsmap"] or b""))
            except binascii.Error:  # The library will not get a table from it, either.
                return 1
        case "TemplateProcessing":
            return max(1, len(step["single"]))
    raise AssertionError(kind)


def check_growth(growth: float, path: Path, what: str) -> None:
    """Raise CheckpointError if a file's steps can make a text too long."""
    if growth > MAX_GROWTH:
        raise CheckpointError(
            f"{path}: {what} can make a text {growth:.3g} times longer, expected at most "
            f"{MAX_GROWTH:,} times; such a file can exhaust the memory"
        )


def growth_of_charsmap(charsmap: bytes) -> int:
    """Return the length of the longest replacement in sentencepiece's table of characters.

    The table is the size of an index as 4 bytes, the index, and strings that end with a zero byte.
    """
    strings = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
    return max(1, *map(len, strings.split(b"\0")))


def growth_of_model(model: bytes) -> int:
    """Return how many times longer a sentencepiece model can make a text.

    Args: model is a valid tokenizer.model, whose field `normalizer_spec.precompiled_charsmap` has
        the table (https://protobuf.dev/programming-guides/encoding/ explains the format).
    """
    specs = _fields(model, 3)
    return max([1, *(growth_of_charsmap(each) for spec in specs for each in _fields(spec, 2))])


def check_length(text: str, growth: float, path: Path) -> None:
    """Raise CheckpointError if a file's steps can make this text too long."""
    if growth > _ORDINARY and len(text) * growth > _MAX_LENGTH:
        raise CheckpointError(
            f"{path}: the text has {len(text):,} characters, and the normalizer can make it "
            f"{growth:.3g} times longer, which could exhaust the memory; encode it in shorter parts"
        )


def _fields(message: bytes, number: int) -> list[bytes]:
    """Return the values of those fields of a protobuf message that have a number and a length."""
    found, at = [], 0
    while at < len(message):
        key, at = _varint(message, at)
        kind, size = key & 7, 0
        if kind in (0, 2):
            value, at = _varint(message, at)
            size = value if kind == 2 else 0
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        if key == number << 3 | 2:
            found.append(message[at : at + size])
        at += size
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at a byte of a message, and the byte after it."""
    number = 0
    for shift in range(0, 70, 7):
        byte = message[at] if at < len(message) else 0
        number |= (byte & 127) << shift
        at += 1
        if byte < 128:
            break
    return number, at
