"""Test that each preset has as many parameters as its checkpoint on the hub."""

from __future__ import annotations

import math

import pytest

from ligermodels.models.auto import families
from tests.families import DECODERS

PUBLISHED = {
    "llama-1-7b": 6_738_415_616,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "codellama-7b": 6_738_546_688,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.2": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-22b": 22_247_282_688,
    "mistral-small-24b": 23_572_403_200,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    # These three counts include the vision tower and the projector.
    "gemma-3-4b": 4_300_079_472,
    "gemma-3-12b": 12_187_325_040,
    "gemma-3-27b": 27_432_406_640,
    # Those of the text models. The cards say 30.7B and 25.2B, and with towers of 0.45B 5.1B and 8B.
    "gemma-4-e2b": 4_628_569_379,
    "gemma-4-e4b": 7_463_013_418,
    "gemma-4-26b-a4b": 25_233_141_790,
    "gemma-4-31b": 30_697_345_340,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    # These counts are of the text models in transformers. With its vision tower, 100,592,896, and
    # its layer for a second token, 20,452,864, the first one fills its file to the byte.
    "qwen3.5-0.8b": 752_393_024,
    "qwen3.5-2b": 1_881_825_088,
    "qwen3.5-4b": 4_205_751_296,
    "qwen3.5-9b": 8_953_803_264,
    "qwen3.5-27b": 26_895_998_464,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "mixtral-8x7b-v0.1": 46_702_792_704,
    "mixtral-8x22b-v0.1": 140_620_634_112,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
    "olmo-3-7b": 7_298_011_136,
    "olmo-3-32b": 32_233_522_176,
    "granite-3.3-2b": 2_533_539_840,
    "granite-3.3-8b": 8_170_864_640,
    "granite-4.0-micro": 3_402_836_480,
    "phi-3-mini-4k": 3_821_079_552,
    # Of the next one only the card's 14B is known.
    "phi-3-medium-4k": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "smollm3-3b": 3_075_098_624,
    # Of these, the cards say 3.4B and 8.4B without the vision tower.
    "ministral-3-3b": 3_429_006_336,
    "ministral-3-8b": 8_489_553_920,
}
VISION_TOWER, VISION_HIDDEN = 416_866_032, 1152


@pytest.mark.parametrize("family", DECODERS)
def test_presets_have_the_published_parameter_counts(family: str) -> None:
    cls = families()[family]
    for name in cls.config_class.presets:
        config = cls.config_class.preset(name)
        count = sum(math.prod(entry.shape) for entry in cls.weight_map(config))
        if name in ("gemma-3-4b", "gemma-3-12b", "gemma-3-27b"):
            count += VISION_TOWER + VISION_HIDDEN * config.hidden_size + VISION_HIDDEN
        assert count == PUBLISHED[name], name
