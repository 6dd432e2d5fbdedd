"""Low-rank adapters: as layers, in PEFT's format, on packed projections and quantized weights."""

from ligermodels.adapters.adapted_model import add_adapters, export_adapter, merged, quantize
from ligermodels.adapters.lora import LoraLinear
from ligermodels.adapters.quantized import QuantizedLinear

__all__ = ["LoraLinear", "QuantizedLinear", "add_adapters", "export_adapter", "merged", "quantize"]
