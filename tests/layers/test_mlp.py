"""The numbers that a gated MLP refuses; tests of kernels and of families compare its values."""

from __future__ import annotations

import pytest

from ligermodels.layers import GatedMLP


def test_numbers_that_no_mlp_has_are_refused() -> None:
    for wrong in ({"hidden_size": 0}, {"intermediate_size": 2.5}, {"activation": "relu"}):
        with pytest.raises(ValueError, match=f"GatedMLP: {next(iter(wrong))}=.*; expected "):
            GatedMLP(**{"hidden_size": 4, "intermediate_size": 6, **wrong})
