"""The float dtypes in which weights are stored, by their names."""

# The name in safetensors -> the name in torch and in config.json.
FLOAT_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
