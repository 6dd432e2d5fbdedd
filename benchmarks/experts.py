"""Compare layers of experts, and a step with them, with peers: python -m benchmarks.experts

The layers are those of the table of benchmarks.ops, with routing: forward + backward, and the bytes
beyond inputs, outputs and gradients. "products" are torch's six grouped products of the same rows
alone.

The model of the step is four layers of Qwen3-30B-A3B with its vocabulary, random bf16 weights and
8,192 tokens. transformers computes the experts with torch's grouped products, and Liger patches the
rest. The time is that of forward and backward, with and without AdamW. For ours, the peak under
each checkpointing policy, with 32,768 tokens, stands beside the prediction.

A step of decoding is that of all layers, after 512 tokens, with weights in bf16 or in 4 bits, of
Qwen3-30B-A3B and of gpt-oss-20b. Its bytes are those of the weights that it reads, of which the
experts are those that the rows choose. Beside the first stands a token of transformers' generate
with its default cache, after a prompt of 512 tokens.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.cases import OPS, Absent, Random
from benchmarks.common import RESULTS, device_time, environment, release_memory, table, write
from benchmarks.decoding import milliseconds
from benchmarks.decoding import step as decoding_step
from benchmarks.ops import measure
from ligermodels.adapters.adapted_model import quantize
from ligermodels.layers import Experts
from ligermodels.models.auto import families

SEQ, LONG = 8192, 32768
PRESET, LAYERS = "qwen3-30b-a3b", 4
OURS = "ligermodels"
DECODING = {
    OURS: (PRESET, 16),
    "4 bits": (PRESET, 4),
    "gpt-oss-20b": ("gpt-oss-20b", 16),
    "gpt-oss-20b, 4 bits": ("gpt-oss-20b", 4),
}
IMPLEMENTATIONS = ("transformers", "transformers + liger", "ligermodels")


def layers() -> list[dict[str, Any]]:
    """Return a row for each size and implementation, and for the products alone."""
    rows = []
    for sizes in OPS["expert_mlp"].table:
        random = Random()
        case = OPS["expert_mlp"].build(random, **sizes)
        row = {"sizes": sizes, "implementation": "products"}
        rows.append(row | {"ms": products_alone(case.inputs(), sizes["top_k"])})
        for name in case.implementations:
            row = {"sizes": sizes, "implementation": name}
            if name != "liger":  # which may not end: see `run_all`
                row |= of_layer(sizes, name)
            rows.append(row)
            print(row, flush=True)
        del case
        release_memory()
    return rows


def of_layer(sizes: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the milliseconds and the gigabytes of one implementation."""
    random = Random()
    try:
        found = measure(OPS["expert_mlp"].build(random, **sizes).implementation(name), random, True)
    except (Absent, ImportError) as error:
        return {"error": f"absent: {error}"}
    finally:
        release_memory()
    forward, both = found["forward"], found["forward + backward"]
    times = {"forward ms": forward["ms"], "ms": both["ms"], "method": both["method"]}
    return times | {"scratch GB": both["scratch GB"]}


def products_alone(inputs: list[torch.Tensor], top_k: int) -> float:
    """Return the milliseconds of the products of forward and backward, of rows in their order."""
    x, gate_up, down, logits, *_ = (t.detach() for t in inputs)
    chosen = logits.topk(top_k).indices.flatten()
    ends = chosen.bincount(minlength=len(down)).cumsum(0, dtype=torch.int32)
    rows = x.repeat_interleave(top_k, 0)
    wide = F.grouped_mm(rows, gate_up.mT, offs=ends)
    made = wide[:, : down.shape[-1]].contiguous()
    pairs = [(rows, gate_up.mT), (made, down.mT), (rows, down), (wide, gate_up)]
    pairs += [(rows.mT, made), (wide.mT, rows)]
    return device_time(lambda: [F.grouped_mm(a, b, offs=ends) for a, b in pairs])["ms"]


def build(implementation: str, layers: int | None = LAYERS, preset: str = PRESET) -> Any:
    """Return a model with random weights on the GPU, by default of as many layers as published."""
    cls = families()["gpt_oss" if preset.startswith("gpt-oss") else "qwen3_moe"]
    sizes = {} if layers is None else {"num_hidden_layers": layers}
    config = cls.config_class.preset(preset, **sizes)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            if implementation == "ligermodels":
                return cls(config)
            import transformers

            if implementation == "transformers + liger":
                from liger_kernel.transformers import apply_liger_kernel_to_qwen3_moe

                apply_liger_kernel_to_qwen3_moe(swiglu=False)  # which are the experts
            theirs = transformers.AutoConfig.for_model(**config.to_dict() | {"use_cache": False})
            return transformers.AutoModelForCausalLM.from_config(
                theirs, attn_implementation="sdpa", experts_implementation="grouped_mm"
            )
    finally:
        torch.set_default_dtype(torch.float32)


def timed(
    model: Any, optimizer: torch.optim.Optimizer | None, steps: int = 8, seq: int = SEQ
) -> tuple[float, int]:
    """Return the median of the milliseconds of a step, and the peak in bytes."""
    times = []
    for step in range(steps + 3):
        ids = torch.randint(0, model.config.vocab_size, (1, seq), device="cuda")
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        model(ids, labels=ids).loss.backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        end.record()
        torch.cuda.synchronize()
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        elif step > 2:
            times.append(start.elapsed_time(end))
    return statistics.median(times), torch.cuda.max_memory_allocated()


def run_one(implementation: str) -> dict[str, Any]:
    model = build(implementation).train()
    row: dict[str, Any] = {}
    row["ms"], peak = timed(model, None)
    row["peak GiB"] = peak / 2**30
    if implementation == "ligermodels":
        row["plans"] = plans(model)
    release_memory()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    row["ms with AdamW"], peak = timed(model, optimizer)
    row["peak GiB with AdamW"] = peak / 2**30
    return row


def plans(model: Any) -> dict[str, dict[str, float]]:
    """Return the time, the peak and the predicted peak under each checkpointing policy."""
    from ligermodels.layers.recompute import POLICIES
    from ligermodels.memory.plan import MemoryPlan
    from ligermodels.memory.simulate import simulate

    found = {}
    for policy in POLICIES:
        model.set_memory_plan(MemoryPlan.uniform(LAYERS, policy))
        predicted = simulate(model, 1, LONG, device=torch.device("cuda", 0)).peak_bytes
        release_memory()
        ms, peak = timed(model, None, 3, LONG)
        found[policy] = {"ms": ms, "peak GiB": peak / 2**30, "predicted GiB": predicted / 2**30}
    model.set_memory_plan(None)
    return found


@torch.no_grad()
def decoding(preset: str = PRESET, bits: int = 16) -> list[dict[str, Any]]:
    """Return the milliseconds of a step of decoding of 1 and 16 rows, and the bytes it reads."""
    model = build("ligermodels", None, preset).requires_grad_(False).eval()
    if bits < 16:
        quantize(model, bits, torch.device("cuda"))
        release_memory()
    experts = [x for x in model.modules() if isinstance(x, Experts)]

    def nbytes(module: torch.nn.Module) -> int:
        return sum(x.nbytes for x in (*module.parameters(), *module.buffers()))

    of_experts = sum(nbytes(x) - nbytes(x.router) for x in experts)
    expert = of_experts / sum(x.num_experts for x in experts)
    # Of the embedding, a step reads single rows.
    others = nbytes(model) - of_experts - model.embed_tokens.weight.nbytes
    rows = []
    for count in (1, 16):
        chosen = 0

        def found(module: Any, given: Any, out: Any) -> None:
            nonlocal chosen
            chosen += out[1].unique().numel()

        hooks = [x.router.register_forward_hook(found) for x in experts]
        model(torch.randint(3, 1000, (count, 1), device="cuda"))
        for hook in hooks:
            hook.remove()
        row: dict[str, Any] = {"rows": count, **decoding_step(model, count, 512)}
        row["experts of a layer"] = chosen / len(experts)
        row["GB"] = (chosen * expert + others) / 1e9
        rows.append(row | {"TB/s": row["GB"] / row["step"]})
    return rows


def theirs_decoding(new: int = 24) -> dict[int, float]:
    """Return the milliseconds of a new token, for 1 and 16 rows."""
    model = build("transformers", layers=48).eval()
    model.config.use_cache = True
    found = {}
    for count in (1, 16):
        ids = torch.randint(3, 1000, (count, 512), device="cuda")

        def generate(after_token: Any, ids: torch.Tensor = ids) -> None:
            def goes_on(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
                after_token()
                return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

            options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            options |= {"max_new_tokens": new, "min_new_tokens": new}
            model.generate(ids, stopping_criteria=[goes_on], **options)

        found[count] = milliseconds(generate, 1, new)
    return found


def run_all(out: Path, liger_seconds: int) -> None:
    """Measure everything, and write experts.json after each part."""
    result: dict[str, Any] = {"environment": environment(), "layers": layers()}
    write("experts.json", result, out)
    result["step"] = {"preset": PRESET, "layers": LAYERS, "tokens": SEQ, "rows": []}
    for name in IMPLEMENTATIONS:
        # Each has its own process, because Liger's patches remain in a process.
        result["step"]["rows"].append({"implementation": name} | in_process("step", name))
        write("experts.json", result, out)
    for name in DECODING:
        result["decoding" if name == OURS else f"decoding, {name}"] = in_process("decoding", name)
        write("experts.json", result, out)
    result["decoding of transformers"] = in_process("decoding", "transformers")
    write("experts.json", result, out)
    every = OPS["expert_mlp"].table
    for row in result["layers"]:
        if row["implementation"] == "liger":
            row |= in_process("layer", str(every.index(row["sizes"])), liger_seconds)
            write("experts.json", result, out)
    columns = ["sizes", "implementation", "forward ms", "ms", "scratch GB", "error"]
    print(table(result["layers"], columns))
    columns = ["implementation", "ms", "peak GiB", "ms with AdamW", "peak GiB with AdamW", "error"]
    print(table(result["step"]["rows"], columns))


def in_process(part: str, name: str, timeout: int = 120) -> Any:
    """Return what another process of this module prints as JSON, or a row with its error."""
    command = [sys.executable, "-m", "benchmarks.experts", "--only", part, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"stopped after {timeout} s"}
    if done.returncode:
        print(name, done.stderr[-3000:], file=sys.stderr)
        return {"error": "failed"}
    print(done.stdout.splitlines()[-1], flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for experts.json")
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument(
        "--liger-seconds", type=int, default=60, help="after which its layer is given up"
    )
    arguments = parser.parse_args()
    if arguments.only is None:
        run_all(arguments.out, arguments.liger_seconds)
    elif arguments.only[0] == "step":
        print(json.dumps(run_one(arguments.only[1])))
    elif arguments.only[0] == "decoding":
        name = arguments.only[1]
        print(json.dumps(decoding(*DECODING[name]) if name in DECODING else theirs_decoding()))
    else:
        sizes = OPS["expert_mlp"].table[int(arguments.only[1])]
        print(json.dumps(of_layer(sizes, "liger")))


if __name__ == "__main__":
    main()
