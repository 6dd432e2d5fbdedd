"""QLoRA of Llama-3-8B on one GPU, beside PEFT and TRL on transformers: python -m benchmarks.qlora

The model has random weights: NF4 in the linears of the layers, bf16 elsewhere. Other rows of ours
have these weights in 8 bits, in float8 or in bf16. Each linear has a
LoRA of rank 16, which AdamW trains. The peers keep NF4 with bitsandbytes. Each row has its own
process; all of them import at once, and then wait for their turn on the GPU. The time is the median
of the steps, and the memory is the peak of allocated bytes. With --captures, a CUDA graph replays
the steps of our rows. --dequantize times the conversion of one weight alone, and --decode the
tokens that models with such weights generate.

Unsloth asks for other versions of TRL and datasets. --unsloth SITE is a folder with Unsloth and the
versions that it asks for (pip install --target SITE); only its rows import from there.
"""

import argparse
import faulthandler
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, environment, table, write

OURS, PEFT, LIGER = "ligermodels", "peft", "peft + liger"
TRL, UNSLOTH = "trl + peft", "unsloth"
# Name of a row -> the implementation, and what is recomputed: every block, nothing, or what the
# plan of a budget says. The peak of PEFT on an H200 is 12.5 GiB. By its default, Unsloth recomputes
# every block, too, and keeps the blocks' inputs on the host.
ROWS: dict[str, tuple[str, str]] = {
    "ligermodels": (OURS, "auto"),
    "ligermodels, every block recomputed": (OURS, "blocks"),
    "ligermodels 8bit": (OURS, "auto"),
    "peft + transformers, every block recomputed": (PEFT, "blocks"),
    "peft + transformers + liger, every block recomputed": (LIGER, "blocks"),
    "trl + peft + transformers, every block recomputed": (TRL, "blocks"),
    "peft + transformers + liger": (LIGER, "nothing"),
    "ligermodels, --memory 12.5GiB": (OURS, "12.5GiB"),
    "unsloth": (UNSLOTH, "unsloth"),
    "unsloth, every block recomputed on the GPU": (UNSLOTH, "blocks"),
    "ligermodels float8": (OURS, "auto"),
    "ligermodels bfloat16": (OURS, "auto"),
    "ligermodels bfloat16, products in float8": (OURS, "auto"),
}
# Unsloth replaces parts of the others when it is imported, and asks to be the first.
UNSLOTH_FIRST = "import unsloth; from benchmarks import qlora; qlora.main()"
KINDS: dict[str, Any] = {"8bit": 8, "float8": "float8"}
DECODED = ("bfloat16", "bfloat16, converted to float8", *KINDS)
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}


def native(device: str, tiny: bool) -> Any:
    """Return a random model in bfloat16, which is built on the device."""
    from ligermodels import LigerLlama, LlamaConfig

    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            changes: dict[str, Any] = TINY if tiny else {}
            return LigerLlama(LlamaConfig.preset("llama-3-8b", **changes))
    finally:
        torch.set_default_dtype(torch.float32)


def ours(row: str, recomputes: str, batch: int, seq: int, device: str, tiny: bool) -> Any:
    from ligermodels import float8
    from ligermodels.adapters.adapted_model import add_adapters, quantize

    model = native(device, tiny)
    if "products" in row:
        float8.convert(model, filter=(lambda name, linear: True) if tiny else None)
    elif "bfloat16" not in row:
        bits = next((bits for kind, bits in KINDS.items() if kind in row), 4)
        quantize(model, bits, torch.device(device))
    add_adapters(model, 16, 32.0)
    if recomputes == "blocks":
        model.activation_checkpointing_enable()
    elif device == "cuda":
        torch.cuda.empty_cache()
        plan = model.plan_memory(batch, seq, recomputes, autocast=torch.bfloat16)
        print(plan, file=sys.stderr)
        model.set_memory_plan(plan)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16), float8.weights_cast_once(model):
            return model(ids, labels=ids).loss

    return model, loss


def hf_model(device: str, tiny: bool) -> Any:
    """Return transformers' model, whose linears bitsandbytes keeps in NF4 as its integration does.

    Their scales are quantised, too.
    """
    import bitsandbytes as bnb
    import transformers

    from ligermodels.integrations.hf_model import LigerForCausalLM

    with torch.device("meta"):
        config = LigerForCausalLM.from_native(native("meta", tiny)).config
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    kind = {"quant_type": "nf4", "compress_statistics": True}
    for name, linear in [*model.model.layers.named_modules()]:
        if isinstance(linear, torch.nn.Linear):
            size = linear.in_features, linear.out_features
            with torch.device("meta"):
                made = bnb.nn.Linear4bit(*size, bias=False, compute_dtype=torch.bfloat16, **kind)
            weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, **kind)
            made.weight = weight.to(device)  # quantises it
            owner, _, last = name.rpartition(".")
            setattr(model.model.layers.get_submodule(owner), last, made)
    model.is_loaded_in_4bit = True
    return model


def lora_config() -> Any:
    import peft

    return peft.LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM")


def theirs(kind: str, recomputes: str, device: str, tiny: bool) -> Any:
    import peft

    if kind == LIGER:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    model = peft.get_peft_model(hf_model(device, tiny), lora_config())
    for parameter in model.parameters():
        if parameter.requires_grad:  # as TRL does for models of 4 bits
            parameter.data = parameter.data.to(torch.bfloat16)
    if recomputes == "blocks":
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def loss(ids: torch.Tensor) -> torch.Tensor:
        return model(ids, labels=ids, use_cache=False).loss

    return model, loss


def run_loop(
    model: Any,
    loss_of: Callable[..., torch.Tensor],
    batch: int,
    seq: int,
    steps: int,
    device: str,
    captures: bool = False,
) -> tuple[list[float], float, dict[str, float]]:
    """Return the milliseconds of each step after two, the last loss, and facts about a step.

    Args: captures: whether a CUDA graph replays the steps.
    """
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True, capturable=captures)
    ids = torch.randint(1000, (batch, seq), device=device)

    def step() -> torch.Tensor:
        loss = loss_of(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    call = step
    if captures:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            captured = step()

        def call() -> torch.Tensor:
            graph.replay()
            return captured

    times, launched = [], []
    for index in range(steps + 2):
        ids.random_(1000)
        if index == 2 and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        _wait(device)
        start = time.perf_counter()
        loss = call()
        launched.append(1e3 * (time.perf_counter() - start))
        _wait(device)
        times.append(1e3 * (time.perf_counter() - start))
    facts = {"ms until the host has launched a step": statistics.median(launched[2:])}
    if device == "cuda":
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            call()
            _wait(device)
        events = [each for each in profiled.key_averages() if each.self_device_time_total > 0]
        facts["launches"] = sum(each.count for each in events)
        facts["GPU busy ms"] = sum(each.self_device_time_total for each in events) / 1e3
    return times[2:], loss.item(), facts


def run_sft(
    kind: str, recomputes: str, batch: int, seq: int, steps: int, device: str, tiny: bool
) -> tuple[list[float], float, dict[str, str]]:
    """Train with TRL's trainer, or with Unsloth's, which replaces it."""
    from benchmarks import qlora_sft

    if kind == TRL:
        model, words, more = hf_model(device, tiny), qlora_sft.tokenizer(), lora_config()
        times, loss = qlora_sft.train(model, words, batch, seq, steps, device, peft_config=more)
    else:
        from ligermodels.converters.hf_config import to_hf

        config = to_hf(native("meta", tiny).config)
        how: str | bool = "unsloth" if recomputes == "unsloth" else True
        model, words = qlora_sft.unsloth(config, TARGETS, how, seq, device)
        times, loss = qlora_sft.train(model, words, batch, seq, steps, device)
    return times, loss, qlora_sft.versions()


def import_all(kind: str) -> None:
    """Import what an implementation needs, so that it does not take time on the GPU."""
    modules = ["ligermodels.adapters.adapted_model", "ligermodels.memory.fit"]
    if kind == UNSLOTH:
        modules = ["unsloth", "ligermodels", "benchmarks.qlora_sft"]
    elif kind != OURS:
        modules = ["bitsandbytes", "peft", "ligermodels.integrations.hf_model"]
        modules += ["liger_kernel.transformers"] if kind == LIGER else []
        modules += ["benchmarks.qlora_sft"] if kind == TRL else []
    for name in modules:
        importlib.import_module(name)


def run_one(
    row: str, batch: int, seq: int, steps: int, device: str, tiny: bool, captures: bool
) -> dict[str, Any]:
    kind, recomputes = ROWS[row]
    start = time.perf_counter()
    torch.manual_seed(0)
    versions: dict[str, str] = {}
    facts: dict[str, float] = {}
    if kind in (TRL, UNSLOTH):
        times, loss, versions = run_sft(kind, recomputes, batch, seq, steps, device, tiny)
    else:
        if kind == OURS:
            model, loss_of = ours(row, recomputes, batch, seq, device, tiny)
        else:
            model, loss_of = theirs(kind, recomputes, device, tiny)
        times, loss, facts = run_loop(model, loss_of, batch, seq, steps, device, captures)
    found = {"row": row, "ms": statistics.median(times), "ms spread": max(times) - min(times)}
    found |= {"each ms": [round(each, 1) for each in times]}
    found["tokens/s"] = batch * seq / found["ms"] * 1e3
    if device == "cuda":
        found["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    found |= {"versions": versions} if versions else {}
    found |= facts | ({"in a CUDA graph": True} if captures else {})
    return found | {"last loss": loss, "seconds in all": time.perf_counter() - start}


def dequantize_times(device: str, rows: int = 28672, columns: int = 4096) -> list[dict[str, Any]]:
    """Time the conversion of gate_up's weight to bfloat16, by this library and by others."""
    from benchmarks.common import device_times
    from ligermodels.adapters import QuantizedLinear

    linear = torch.nn.Linear(columns, rows, bias=False, device=device, dtype=torch.bfloat16)
    layer = QuantizedLinear(linear, 4)
    calls: dict[str, Callable[[], Any]] = {OURS: lambda: layer.dequantized(torch.bfloat16)}
    try:
        from bitsandbytes import functional as bnb

        packed, state = bnb.quantize_nf4(linear.weight.data, compress_statistics=True)
        calls["bitsandbytes"] = lambda: bnb.dequantize_4bit(packed, state)
    except (ImportError, RuntimeError) as error:
        print(f"bitsandbytes: {error}", file=sys.stderr)
    try:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        weight = to_nf4(linear.weight.data)
        calls["torchao"] = weight.get_original_weight
    except (ImportError, RuntimeError) as error:
        print(f"torchao: {error}", file=sys.stderr)
    found = []
    for name, call in calls.items():
        error = (call().float() - linear.weight.float()).norm() / linear.weight.float().norm()
        milliseconds = statistics.median(device_times(call)) if device == "cuda" else 0.0
        found.append({"conversion": name, "ms": milliseconds, "relative error": error.item()})
    return found


def start(row: str, options: list[str], site: Path | None, folder: str) -> subprocess.Popen[str]:
    """Start the process of a row. It imports its packages, prints "ready", and waits for a line.

    Unsloth writes source files to a new folder in `folder` when it is imported.
    """
    unsloth = ROWS[row][0] == UNSLOTH
    program = ["-c", UNSLOTH_FIRST] if unsloth else ["-m", "benchmarks.qlora"]
    environ = dict(os.environ)
    if unsloth and site:
        # Not the folders of PYTHONPATH, where the versions of the other rows may be.
        root = Path(__file__).parents[1]
        environ["PYTHONPATH"] = os.pathsep.join([str(site.absolute()), str(root)])
        environ |= {"HF_HUB_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1"}
        environ["UNSLOTH_COMPILE_LOCATION"] = tempfile.mkdtemp(dir=folder)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, *program, *options, "--waits", "--only", row]
    return subprocess.Popen(command, text=True, env=environ, **pipes)  # type: ignore[call-overload]


def result_of(row: str, worker: subprocess.Popen[str], limit: int, log: Path) -> dict[str, Any]:
    """Let a waiting process run, and return what it measured, or why it failed.

    What a failed process printed goes to stderr and to the end of the log.
    """
    late = False
    try:
        out, said = worker.communicate("go\n", timeout=limit)
    except subprocess.TimeoutExpired:
        late = True
        worker.kill()
        out, said = worker.communicate()
    if not late and worker.returncode == 0:
        return json.loads(out.splitlines()[-1])
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        print(f"{row}\n{out}\n{said}", file=file)
    print(f"{out[-1000:]}\n{said[-6000:]}", file=sys.stderr)  # ends with where it was
    if late:
        said = f"it took more than {limit} seconds"
    lines = [line for line in said.strip().splitlines() if line.strip()]
    return {"row": row, "ms": "failed", "why": (lines or ["no output"])[-1][:600]}


def decoding(kind: str, device: str, tiny: bool) -> dict[str, Any]:
    """Return the milliseconds of a new token with weights of this kind, by the number of rows."""
    from ligermodels import float8
    from ligermodels.adapters.adapted_model import quantize

    model = native(device, tiny).requires_grad_(False).eval()
    if kind in KINDS:
        quantize(model, KINDS[kind], torch.device(device))
    elif "float8" in kind:
        float8.convert(model, filter=(lambda name, linear: True) if tiny else None)
    row: dict[str, Any] = {"weights": kind}
    if device == "cuda":
        torch.cuda.empty_cache()
        row["GiB"] = torch.cuda.memory_allocated() / 2**30
    for rows in (1, 8, 64):
        ids = torch.randint(0, 1000, (rows, 64), device=device)
        for new in (4, 64, 64):  # the last one has the graph
            _wait(device)
            start = time.perf_counter()
            model.generate(ids, max_new_tokens=new, eos_token_id=[])
            _wait(device)
            row[f"ms, {rows} rows"] = (time.perf_counter() - start) / new * 1e3
    print(row, flush=True)
    return row


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for qlora.json or dequantize.json")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--limit", type=int, default=120, help="seconds for each row")
    parser.add_argument("--rows", nargs="+", type=int)
    parser.add_argument("--unsloth", type=Path, metavar="SITE")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the code")
    parser.add_argument("--captures", action="store_true", help="replay steps as a CUDA graph")
    parser.add_argument("--dequantize", action="store_true")
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--only", choices=ROWS, help="measure one row in this process")
    parser.add_argument("--waits", action="store_true", help="with --only, wait for a line first")
    given = parser.parse_args()
    if given.dequantize:
        found = dequantize_times(given.device)
        write("dequantize.json", {"environment": environment(), "rows": found}, given.out)
        print(table(found, ["conversion", "ms", "relative error"]))
        return
    if given.decode:
        found = [decoding(kind, given.device, given.tiny) for kind in DECODED]
        write("quantized_decoding.json", {"environment": environment(), "rows": found}, given.out)
        print(table(found, list(found[0])))
        return
    if given.only:
        import_all(ROWS[given.only][0])
        if given.waits:
            print("ready", flush=True)
            input()
            faulthandler.dump_traceback_later(given.limit - 2)
        sizes = given.batch, given.seq, given.steps
        print(json.dumps(run_one(given.only, *sizes, given.device, given.tiny, given.captures)))
        return
    names = [name for name in ROWS if given.unsloth or ROWS[name][0] != UNSLOTH]
    if given.rows:
        names = [list(ROWS)[index] for index in given.rows]
    options = ["--device", given.device, "--limit", str(given.limit)]
    options += ["--batch", str(given.batch), "--seq", str(given.seq), "--steps", str(given.steps)]
    options += ["--tiny"] if given.tiny else []
    options += ["--captures"] if given.captures else []
    with tempfile.TemporaryDirectory() as folder:
        workers = [start(name, options, given.unsloth, folder) for name in names]
        for worker in workers:  # an import would disturb what is measured
            assert worker.stdout is not None
            while worker.stdout.readline() not in ("ready\n", ""):  # Unsloth prints other lines
                pass
        rows = []
        log = (given.out or RESULTS) / "qlora_failures.log"
        for name, worker in zip(names, workers):
            rows.append(result_of(name, worker, given.limit, log))
            print(rows[-1], flush=True)
            write("qlora.json", {"environment": environment(), "rows": rows}, given.out)
    columns = ["row", "ms", "ms spread", "tokens/s", "peak GiB", "last loss", "why"]
    print(table(rows, columns))


if __name__ == "__main__":
    main()
