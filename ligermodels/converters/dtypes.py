"""The float dtypes in which weights are stored, by their names."""

# The name in safetensors -> the name in torch and in config.json.
FLOAT_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def dtype_name(text: str) -> str:
    """Return torch's name of a dtype, for "bf16" and "torch.bfloat16", too. Others stay."""
    text = text.removeprefix("torch.")
    return _SHORT_NAMES.get(text, text)
