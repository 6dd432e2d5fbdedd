"""The float dtypes that weights are stored in, by their names."""

# As safetensors spells them -> as torch and config.json do.
FLOAT_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
