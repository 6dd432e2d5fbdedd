"""Time and peak memory of a training step under memory plans: python -m benchmarks.memory

--rows measures whole models: transformers, transformers with Liger, and ligermodels with a plan for
each byte budget. --policies measures the memory and the time of a layer under each policy.
--predict N measures the peaks of N random models and plans, and compares them with the predictions.
All need a GPU. Each part runs in its own process. The results go into memory.json, which keeps
earlier rows of other parts; `python -m benchmarks.memory_plot` makes tables and a plot of it.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from benchmarks.common import RESULTS, environment, release_memory, table, write
from benchmarks.memory_works import GIB, HF, LIGER, OURS, WORKS, Setting, Work
from ligermodels.layers.recompute import POLICIES
from ligermodels.memory.plan import LayerPlan, MemoryPlan

Row = dict[str, Any]

# The fields that name a row. A new row replaces an older one of the same name.
KEYS = {
    "environments": (),
    "rows": ("work", "setting"),
    "policies": ("policy",),
    "recipes": ("work", "recipe"),  # of examples/optimizer_memory.py
    "predictions": ("case",),
    "times": ("work", "setting"),  # a plan's time, predicted again after its row was measured
}


class Models:
    """Models of all implementations that share one set of weights and AdamW states.

    Each tensor of transformers is a view of rows of ours. So the implementations can take turns in
    one process, and each holds as much memory as if it were alone.
    """

    def __init__(self, work: Work, dtype: torch.dtype, device: str = "cuda") -> None:
        from ligermodels.models.auto import families

        self.work, self.dtype, self.device = work, dtype, device
        model_class = families()[work.family]
        self.config = model_class.config_class.preset(work.preset, **work.changes)
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                self.ours = model_class(self.config).train()
        finally:
            torch.set_default_dtype(torch.float32)
        self._states = {
            name: {
                "step": torch.zeros((), device=device),
                **{each: torch.zeros_like(p) for each in ("exp_avg", "exp_avg_sq")},
            }
            for name, p in self.ours.named_parameters()
            if work.adamw
        }
        self._theirs: dict[tuple[str, str], tuple[Any, torch.optim.Optimizer | None]] = {}
        self.plans: dict[Setting, MemoryPlan] = {}
        self.liger_is_applied = False
        self.our_optimizer = self._optimizer(
            {p: self._states.get(name, {}) for name, p in self.ours.named_parameters()}
        )

    def get(self, setting: Setting) -> tuple[Any, torch.optim.Optimizer | None]:
        """Return the model of a setting, and its optimizer if the work has one.

        Liger's patches stay in the process, so plain transformers must come before Liger.
        """
        if setting.implementation == OURS:
            return self.ours, self.our_optimizer
        assert not (setting.implementation == HF and self.liger_is_applied)
        if setting.implementation == LIGER and not self.liger_is_applied:
            from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

            MODEL_TYPE_TO_APPLY_LIGER_FN[self.work.family]()
            self.liger_is_applied = True
        key = setting.implementation, setting.attention
        if key not in self._theirs:
            self._theirs[key] = self._make_theirs(setting.attention)
        return self._theirs[key]

    def _optimizer(self, states: dict[Tensor, Row]) -> torch.optim.Optimizer | None:
        if not self.work.adamw:
            return None
        optimizer = torch.optim.AdamW(states, lr=1e-5, fused=True)
        optimizer.state.update(states)
        return optimizer

    def _make_theirs(self, attention: str) -> tuple[Any, torch.optim.Optimizer | None]:
        import transformers

        from ligermodels.converters.hf_config import to_hf

        values = to_hf(self.config) | {"use_cache": False}
        family = values.pop("model_type")

        def make(device: str, **changes: Any) -> Any:
            config = transformers.AutoConfig.for_model(family, **values | changes)
            with torch.device(device):
                return transformers.AutoModelForCausalLM.from_config(
                    config, dtype=self.dtype, attn_implementation=attention
                )

        model = make("meta").train()
        # Buffers are not in the weight map. They are those of a model of one layer.
        values.pop("layer_types", None)
        donor = make(
            self.device,
            num_hidden_layers=1,
            vocab_size=8,
            intermediate_size=8,
            bos_token_id=1,
            eos_token_id=1,
            pad_token_id=0,
        )
        for name, module in list(donor.named_modules()):
            if any(True for _ in module.buffers(recurse=False)):
                model.set_submodule(name, module)
        ours = dict(self.ours.named_parameters())
        states: dict[Tensor, Row] = {}
        for entry in self.ours.weight_map(self.config):
            for span in entry.spans:
                rows = slice(span.row, span.row + span.rows)
                parameter = nn.Parameter(ours[entry.name].detach()[rows])
                module, _, name = span.source.rpartition(".")
                setattr(model.get_submodule(module), name, parameter)
                states[parameter] = {
                    # The count of steps is not shared, because three tensors may be one of ours.
                    key: torch.zeros_like(value) if key == "step" else value[rows]
                    for key, value in self._states.get(entry.name, {}).items()
                }
        if self.config.tie_word_embeddings:
            model.get_output_embeddings().weight = model.get_input_embeddings().weight
        tensors = [*model.parameters(), *model.buffers()]
        assert not any(tensor.is_meta for tensor in tensors)
        return model, self._optimizer(states)


def attention_ops() -> list[Any]:
    """Return torch's ops for attention, whose outputs selective checkpointing keeps."""
    aten = torch.ops.aten
    return [
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    ]


def every_second_product() -> Callable[..., CheckpointPolicy]:
    """Return a policy of selective checkpointing that keeps every second matrix product."""
    counts = Counter[bool]()
    products = torch.ops.aten.mm.default, torch.ops.aten.addmm.default

    def policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if op in products:
            counts[context.is_recompute] += 1
        save = op in products and counts[context.is_recompute] % 2
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


@contextlib.contextmanager
def recomputing(blocks: Iterable[nn.Module], keeps: str) -> Iterator[None]:
    """Run blocks under torch's checkpointing; keep their input, or what the setting names, too."""
    options: dict[str, Any] = {"use_reentrant": False}
    select = create_selective_checkpoint_contexts
    if keeps == "attention":
        options["context_fn"] = lambda: select(attention_ops())
    elif keeps == "products":
        options["context_fn"] = lambda: select(every_second_product())
    wrapped = list(blocks)
    try:
        for block in wrapped:
            block.__dict__["forward"] = partial(checkpoint, block.forward, **options)
        yield
    finally:
        for block in wrapped:
            block.__dict__.pop("forward", None)


def planned(
    model: Any, setting: Setting, work: Work, optimizer: torch.optim.Optimizer | None
) -> tuple[MemoryPlan, Row]:
    """Return the plan of a setting, and what it predicts."""
    # Peaks of allocated bytes are compared; "auto" plans as it does for everybody.
    counted = {} if setting.budget is None else {"count": "allocated", "reserve": 0.0}
    start = time.perf_counter()
    plan = model.plan_memory(
        work.batch,
        work.seq,
        budget="auto" if setting.budget is None else round(setting.budget * GIB),
        host_budget=round(setting.host * GIB),
        **counted,
        optimizer_bytes=0 if optimizer is None else optimizer,
    )
    prediction = plan.prediction
    return plan, {
        "planning s": time.perf_counter() - start,
        "predicted GiB": prediction.peak_bytes / GIB,
        "predicted reserved GiB": prediction.reserved_bytes / GIB,
        "predicted ms": prediction.seconds * 1e3,  # without the optimizer
        "plan": str(plan),
    }


@contextlib.contextmanager
def applied(model: Any, setting: Setting, plan: MemoryPlan | None) -> Iterator[None]:
    """Let the model's blocks keep what the setting says, or for "plan" what the plan says."""
    if setting.keeps == "plan":
        model.set_memory_plan(plan)
        try:
            yield
        finally:
            model.set_memory_plan(None)
    elif setting.keeps == "all":
        yield
    else:
        blocks = model.layers if setting.implementation == OURS else model.model.layers
        with recomputing(blocks[: setting.blocks], setting.keeps):
            yield


def host_bytes() -> int:
    """Return the bytes of pinned host memory that torch's allocator has handed out."""
    return torch.cuda.host_memory_stats().get("active_bytes.current", 0)


def stored_bytes(model: Any) -> int:
    """Return the most bytes that the layers of a model have had in host memory at any time.

    The bytes that torch's allocator has handed out may be those of an earlier model, too.
    """
    return sum(offloader.stats().peak for offloader in model._offloaders.values())


def release() -> None:
    """Give free memory back to the GPU and to the host."""
    release_memory()
    for name in ("_host_emptyCache", "_accelerator_emptyHostCache"):
        if hasattr(torch._C, name):
            getattr(torch._C, name)()
            break


def training_step(model: Any, optimizer: torch.optim.Optimizer | None, ids: Tensor) -> float:
    """Compute the loss and all gradients, then step. Return the loss."""
    loss = model(ids, labels=ids).loss
    loss.backward()
    parameters = list(model.parameters())
    assert all(p.grad is not None for p in parameters if p.requires_grad)
    if optimizer is not None:
        optimizer.step()
    for parameter in parameters:
        parameter.grad = None
    return loss.item()


def milliseconds(run: Callable[[], Any]) -> float:
    """Return the time of a call, which may wait for the device."""
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def measure(models: Models, setting: Setting, row: Row) -> None:
    """Measure a turn of a setting, and add it to its row."""
    work = models.work
    model, optimizer = models.get(setting)
    ids = torch.randint(3, models.config.vocab_size, (work.batch, work.seq), device=models.device)
    if setting.keeps == "plan" and setting not in models.plans:
        models.plans[setting], said = planned(model, setting, work, optimizer)
        row |= said
    release()
    host_before = host_bytes()
    with applied(model, setting, models.plans.get(setting)):
        losses: list[float] = []

        def step(seq: int | None = None) -> None:
            losses.append(training_step(model, optimizer, ids[:, :seq]))

        warm_seq = None if setting.host else work.warm_seq
        row.setdefault("first ms", milliseconds(partial(step, warm_seq)))
        if warm_seq is not None:
            release()  # blocks of other sizes
        torch.cuda.reset_peak_memory_stats()
        row.setdefault("turns", []).append([milliseconds(step) for _ in range(work.steps)])
        figures = {
            "peak GiB": torch.cuda.max_memory_allocated() / GIB,
            "reserved GiB": torch.cuda.max_memory_reserved() / GIB,
            "host GiB": (host_bytes() - host_before) / GIB,
        }
    row |= {name: max(value, row.get(name, 0)) for name, value in figures.items()}
    times = [ms for turn in row["turns"] for ms in turn]
    row["ms"] = statistics.median(times)
    row["ms spread"] = max(times) - min(times)
    row["tokens/s"] = work.batch * work.seq / row["ms"] * 1e3
    row["loss"] = losses[-1]


def run_work(
    name: str, deadline: float, emit: Callable[[str, Row], None], names: Sequence[str] = ()
) -> None:
    """Measure the settings of a work. Each second turn has the reverse order.

    Args:
        deadline: the `time.monotonic()` after which no setting begins.
        names: texts; only settings whose name has one of them are measured. By default all are.
    """
    work = WORKS[name]
    total = torch.cuda.get_device_properties(0).total_memory
    settings = [
        setting
        for setting in work.settings_for(total)
        if not names or any(text in setting.name for text in names)
    ]
    if not settings:
        return
    torch.manual_seed(0)
    models = Models(work, torch.bfloat16)
    rows = {
        setting: {
            "work": work.name,
            "setting": setting.name,
            "implementation": setting.implementation,
            "keeps": setting.keeps,
            "budget GiB": setting.budget,
        }
        for setting in settings
    }
    compiled_for: tuple[str, str] | None = None
    for turn in range(work.turns):
        for setting in settings if turn % 2 == 0 else reversed(settings):
            row = rows[setting]
            too_late = setting.implementation == HF and models.liger_is_applied
            if time.monotonic() > deadline or too_late or "error" in row:
                continue
            if (setting.implementation, setting.attention) != compiled_for:
                # All implementations compile the same function, FlexAttention. What one has
                # compiled would let the next have dynamic shapes.
                torch._dynamo.reset()
                compiled_for = setting.implementation, setting.attention
            try:
                measure(models, setting, row)
            except Exception as error:  # the other settings are still measured
                row["error"] = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            models.ours.zero_grad(set_to_none=True)
            release()
            emit("rows", row)


# Tokens, and the two numbers of layers whose difference gives the figures of one layer.
LEVEL_SIZES = (16384, 4, 8)


def run_policies(deadline: float, emit: Callable[[str, Row], None]) -> None:
    """Measure the memory and the time of a layer of Llama-3-8B under each checkpointing policy.

    The figures are the difference between a model of 8 layers and one of 4, divided by 4.
    """
    from ligermodels import LigerLlama, LlamaConfig

    tokens, few, many = LEVEL_SIZES
    models: dict[int, Any] = {}
    torch.set_default_dtype(torch.bfloat16)
    for count in (few, many):
        config = LlamaConfig.preset("llama-3-8b", num_hidden_layers=count, vocab_size=1024)
        with torch.device("cuda"):
            models[count] = LigerLlama(config).train()
    torch.set_default_dtype(torch.float32)
    ids = torch.randint(1024, (1, tokens), device="cuda")
    grad = torch.randn(1, tokens, models[few].config.hidden_size, device="cuda").bfloat16()
    all_ms = None
    for host in (False, True):
        for policy in POLICIES:
            if time.monotonic() > deadline:
                return
            layer = LayerPlan(policy, host)
            row: Row = {"policy": str(layer), "tokens": tokens}
            try:
                kept, times, pinned = {}, {}, {}
                for count, model in models.items():
                    budget = 24 * GIB if host else 0
                    model.set_memory_plan(MemoryPlan((layer,) * count, host_budget=budget))
                    times[count], kept[count] = policy_figures(model, ids, grad)
                    pinned[count] = stored_bytes(model)
                    model.set_memory_plan(None)
                    release()
                layers = many - few
                row["ms of a layer"] = (times[many] - times[few]) / layers
                row["bytes per token"] = (kept[many] - kept[few]) / layers / tokens
                row["host bytes per token"] = (pinned[many] - pinned[few]) / layers / tokens
                all_ms = row["ms of a layer"] if all_ms is None else all_ms
                row["extra ms"] = row["ms of a layer"] - all_ms
            except Exception as error:  # the other policies are still measured
                row["error"] = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            emit("policies", row)


def policy_figures(model: Any, ids: Tensor, grad: Tensor) -> tuple[float, int]:
    """Return the median milliseconds of forward and backward, and the bytes kept between them.

    They are counted once the copies to the host are done and nothing holds their sources.
    """
    kept = []

    def step() -> None:
        before = torch.cuda.memory_allocated()
        hidden = model(ids)
        kept.append(torch.cuda.memory_allocated() - before - hidden.nbytes)
        hidden.backward(grad)
        model.zero_grad(set_to_none=True)

    times = [milliseconds(step) for _ in range(8)]
    return statistics.median(times[3:]), kept[-1]


def run_part(part: str, deadline: float, emit: Callable[[str, Row], None]) -> None:
    """Run a part in this process: "policies", "predict:N:NUMBERS" or "WORK:TEXT|TEXT"."""
    name, _, argument = part.partition(":")
    if name == "policies":
        run_policies(deadline, emit)
    elif name == "predict":
        from benchmarks.memory_cases import run_cases

        count, _, chosen = argument.partition(":")
        numbers = [int(number) for number in chosen.split(",")] if chosen else None
        run_cases(int(count), deadline, emit, numbers)
    else:
        run_work(name, deadline, emit, argument.split("|") if argument else ())


def merge(result: dict[str, Any], section: str, row: Row) -> None:
    """Put a row into the result, in place of the row of the same name and GPU."""
    key = ("gpu", *KEYS[section])
    rows = result.setdefault(section, [])
    for place, other in enumerate(rows):
        if [other.get(name) for name in key] == [row.get(name) for name in key]:
            rows[place] = row
            return
    rows.append(row)


def run_parts(parts: list[str], seconds: float, out: Path | None) -> dict[str, Any]:
    """Run each part in its own process; write the result after each row.

    This process leaves the GPU alone, because even an unused context takes memory there.
    """
    end = time.monotonic() + seconds
    earlier = [folder / "memory.json" for folder in (out, RESULTS) if folder is not None]
    found = next((file for file in earlier if file.is_file()), None)
    result = json.loads(found.read_text()) if found else {}
    for part in parts:
        left = end - time.monotonic()
        if left < 10:
            print(f"{part}: no time is left")
            continue
        command = [sys.executable, "-m", "benchmarks.memory", "--only", part]
        process = subprocess.Popen(
            [*command, "--seconds", str(left - 10)], stdout=subprocess.PIPE, text=True
        )
        killer = threading.Timer(left, process.kill)
        killer.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"section": '):
                row = json.loads(line)
                merge(result, row.pop("section"), row)
                write("memory.json", result, out)
                line = short(row) + "\n"
            print(line, end="", flush=True)
        killer.cancel()
        if process.wait():
            print(f"{part}: the process ended with {process.returncode}", flush=True)
    return result


def short(row: Row) -> str:
    """Return a row on one line, without its long texts."""
    left_out = ("plan", "turns", "implementation", "keeps")
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
        if name not in left_out and value is not None
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="*", choices=WORKS, help="works; the default is all")
    parser.add_argument(
        "--policies", action="store_true", help="measure every checkpointing policy"
    )
    parser.add_argument("--predict", type=int, metavar="N", help="compare N random plans")
    parser.add_argument("--cases", type=int, nargs="+", help="of these plans, only some")
    parser.add_argument("--settings", nargs="+", default=[], help="texts in the names of settings")
    parser.add_argument("--seconds", type=float, default=3600, help="start nothing after this time")
    parser.add_argument("--out", type=Path, help="folder for memory.json")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        machine = environment()

        def emit(section: str, row: Row) -> None:
            print(json.dumps({"section": section, "gpu": machine["gpu"]} | row), flush=True)

        emit("environments", machine)
        run_part(given.only, time.monotonic() + given.seconds, emit)
        return
    works = [] if given.rows is None else given.rows or list(WORKS)
    parts = [f"{work}:{'|'.join(given.settings)}" for work in works]
    parts += ["policies"] * given.policies
    chosen = ",".join(map(str, given.cases or ()))
    parts += [f"predict:{given.predict}:{chosen}"] * bool(given.predict)
    result = run_parts(parts or list(WORKS), given.seconds, given.out)
    columns = ["work", "setting", "ms", "peak GiB", "predicted GiB", "reserved GiB", "host GiB"]
    print(table(result.get("rows", []), [*columns, "error"]))


if __name__ == "__main__":
    main()
