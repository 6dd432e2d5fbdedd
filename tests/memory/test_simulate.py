"""A simulated step makes the allocations of a real one."""

from __future__ import annotations

import pytest
import torch

from ligermodels import LigerLlama, LlamaConfig
from ligermodels.adapters.adapted_model import add_adapters
from ligermodels.layers import Attention, CrossAttention, RMSNorm, pre_norm
from ligermodels.layers.recompute import POLICIES
from ligermodels.memory.offload import HOLD
from ligermodels.memory.plan import LayerPlan, MemoryPlan
from ligermodels.memory.simulate import Step, run_step, simulate
from ligermodels.memory.torch_private import Sharding, plain
from ligermodels.memory.tracker import Tracker
from ligermodels.models.auto import families
from tests.families import DECODERS, OWN, sampled
from tests.memory.step_bytes import error_of_prediction
from tests.pairwise import pairwise
from tests.tiny_models import VOCAB, random_model

CPU, GPU = torch.device("cpu"), torch.device("cuda")
BATCH, SEQ = 2, 24


def real_step(model, step_module=None, **inputs):
    """Run a real step on the CPU under the tracker."""
    called = model if step_module is None else step_module
    model.zero_grad()
    ids = torch.randint(VOCAB, (BATCH, SEQ))
    # The host can see that all targets of a chunk count; a simulation cannot.
    inputs |= {"input_ids": ids, "labels": torch.full_like(ids, -100)}
    options = Step(step_module=step_module)
    return run_step(model, Tracker("cpu", seen="cpu"), inputs, options, Sharding(model, called))


def freeze_half(model) -> None:
    for index, p in enumerate(model.parameters()):
        p.requires_grad_(index % 2 == 1)


CASES = ["plain", "packed", "frozen", "tied", "autocast", *POLICIES[1:], "input autocast"]


@pytest.mark.usefixtures("rows_at_once")
@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_weights_that_are_made_of_several_tensors(name: str) -> None:
    """Those of torchao's quantization, under adapters."""
    quantization = pytest.importorskip("torchao.quantization")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    model = random_model("llama", num_hidden_layers=2, **sizes).requires_grad_(False)
    floats = sum(p.nbytes for p in model.parameters())
    quantization.quantize_(model.layers, getattr(quantization, name)())
    parts = plain(*model.parameters(), *model.buffers())
    found = simulate(model, BATCH, SEQ, device=CPU).weight_bytes
    assert found == sum(part.nbytes for part in parts) < floats
    add_adapters(model, 4, 8.0)
    for policy in ("all", "input"):
        model.set_memory_plan(MemoryPlan.uniform(2, policy))
        assert abs(error_of_prediction(model, 32)) < 0.005


# Blocks of the other families hold the same tensors as one of these, so they have one case by
# default.
SAMPLED = {
    "llama": CASES,
    "gemma2": ["packed", "input autocast"],
    "gemma3_text": ["frozen", "no_gate_up"],
}


@pytest.mark.parametrize(
    ("family", "case"),
    [
        pytest.param(
            family,
            case,
            marks=[] if case in SAMPLED.get(family, usual) else [pytest.mark.long],
        )
        for family in DECODERS
        for usual in [[] if DECODERS[family].composed else ["input"]]
        for case in CASES
    ],
)
def test_a_step_on_the_cpu(family, case, request) -> None:
    if (family, case) not in (("llama", "plain"), ("llama", "autocast")):  # the head is the same
        request.getfixturevalue("rows_at_once")
    tied = {"tie_word_embeddings": case == "tied"}
    model = random_model(family, **OWN[family] | tied)
    inputs = {}
    if case == "packed":
        inputs["position_ids"] = (torch.arange(SEQ) % 7).expand(BATCH, -1).contiguous()
    elif case == "frozen":
        freeze_half(model)
    policy = case.partition(" ")[0]
    if policy in POLICIES:
        model.set_memory_plan(MemoryPlan((LayerPlan(policy),) * len(model.layers)))
    autocast = torch.bfloat16 if "autocast" in case else None
    simulated = simulate(model, BATCH, SEQ, device=CPU, packed=case == "packed", autocast=autocast)
    if autocast is not None:
        model.forward = torch.autocast("cpu", autocast)(model.forward)
    real = real_step(model, **inputs)
    assert bytes_of(simulated) == bytes_of(real)
    for name, phase in real.phases.items():
        made = simulated.phases[name].work
        assert made.product_flops == phase.work.product_flops
        if autocast is not None and DECODERS[family].experts:
            continue  # on a CPU, only experts that have a row are cast, and the simulation has none
        # The real step also looks at its targets.
        assert made.moved_bytes == pytest.approx(phase.work.moved_bytes, rel=0.02, abs=2000)


class Crossed(LigerLlama):
    """Each layer also attends to a memory."""

    def make_block(self, layer_index: int) -> torch.nn.Module:
        return CrossedBlock(self.config.hidden_size, layer_index)


class CrossedBlock(torch.nn.Module):
    def __init__(self, hidden: int, index: int) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList([RMSNorm(hidden), RMSNorm(hidden)])
        self.self_attn = Attention(hidden, 4, layer_index=index)
        self.cross_attn = CrossAttention(hidden, 4, 2, memory_size=20)

    def forward(self, x, residual, context):
        x, residual = self.self_attn(pre_norm(self.norms[0], x, residual), context)
        normed = pre_norm(self.norms[1], x, residual)
        return self.cross_attn(normed, context.memory, context.memory_mask)


class Reading(torch.nn.Module):
    """The decoder with an encoder, whose output it attends to."""

    def __init__(self, model) -> None:
        super().__init__()
        self.model, self.encoder = model, torch.nn.Linear(20, 20)

    def forward(self, input_ids, labels):
        read = self.encoder.weight.new_ones(len(input_ids), 70, 20)
        return self.model(input_ids, labels=labels, memory=self.encoder(read)).loss


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_with_an_encoder(policy) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3}
    model = Crossed(LlamaConfig(vocab_size=VOCAB, **sizes))
    model.set_memory_plan(MemoryPlan.uniform(3, policy))
    both = Reading(model)
    simulated = simulate(model, BATCH, SEQ, device=CPU, step_module=both)
    real = real_step(model, both)
    assert both.encoder.weight.grad is not None
    assert bytes_of(simulated) == bytes_of(real)
    assert simulated.work("backward").product_flops == real.work("backward").product_flops


def bytes_of(made) -> tuple[object, ...]:
    phases = [(name, x.before, x.peak, x.after) for name, x in made.phases.items()]
    counts = made.weight_bytes, made.grad_bytes, made.reserved_bytes
    return made.peak_bytes, counts, phases


@pytest.fixture
def triton():
    return pytest.importorskip("ligermodels.kernels.triton")


def real_size(preset: str, **changes):
    """A model of real size in bfloat16, without memory."""
    cls = families()[preset.partition("-")[0]]
    with torch.device("meta"):
        return cls(cls.config_class.preset(preset, **changes)).to(torch.bfloat16)


@pytest.mark.parametrize(
    "preset, batch, seq, measured",
    [
        ("llama-3-8b", 8, 2048, 96.3),
        ("llama-3-8b", 1, 8192, 71.1),
        ("gemma-7b", 16, 512, 83.9),
        ("qwen2-7b", 16, 512, 68.9),
    ],
)
def test_peaks_that_were_measured(triton, preset, batch, seq, measured) -> None:
    """The peaks in GiB of steps with AdamW on an H200, without a plan."""
    made = simulate(real_size(preset), batch, seq, device=GPU)
    peak = (made.peak_bytes + 2 * made.weight_bytes) / 2**30
    assert peak == pytest.approx(measured, rel=0.003)


def test_bytes_that_a_layer_keeps_here_or_on_the_host(triton) -> None:
    """Of Llama-3-8B, for each token: numbers in bfloat16, and scalars in float32."""
    count = 10
    model = real_size("llama-3-8b", num_hidden_layers=count)
    for policy, numbers, scalars in (
        ("all", 2 * 4096 + 6144 + 4096 + 2 * 14336, 2 + 32),
        ("no_gate_up", 2 * 4096 + 6144 + 4096, 1 + 32),
        ("attention", 4096 + 4096, 32),
        ("input", 4096, 0),
    ):
        made = []
        for host in (False, True):
            plan = MemoryPlan.uniform(count, LayerPlan(policy, host), host_budget=2**40)
            model.set_memory_plan(plan)
            made.append(simulate(model, 1, 16384, device=GPU))
        kept, offloaded = made
        phase = kept.phases["forward of layer 5"]
        found = (phase.after - phase.before) / 16384  # with two numbers of the random generator
        assert found == pytest.approx(2 * numbers + 4 * scalars, abs=0.1)
        assert kept.host_bytes == 0 < offloaded.host_bytes
        # The last two layers' tensors are still on the GPU, and stay there, in backward.
        returned = offloaded.work("backward").from_host_bytes
        assert returned == offloaded.host_bytes * (count - 2) // count
        freed = kept.phases["backward"].before - offloaded.phases["backward"].before
        # The last layers may still be on their way when forward ends.
        least = offloaded.host_bytes * (count - HOLD - 2) / count
        assert least <= freed <= offloaded.host_bytes * 1.01


@pairwise(
    family=sampled(DECODERS),
    options=[
        {"packed": True},
        {"packed": True, "max_seqlen": 8},
        {"autocast": torch.bfloat16},
        {"head_options": {"skip_ignored": True}},
        {"head_options": {"reduction": "sum", "max_scratch_bytes": 2**16}},
    ],
    checkpointed=[False, True],
)
def test_a_step_on_a_gpu(triton, family, options, checkpointed) -> None:
    model = random_model(family, **OWN[family])
    if checkpointed:
        model.activation_checkpointing_enable()
    made = simulate(model, 1, SEQ, device=GPU, **options)
    assert made.peak_bytes > made.phases["backward"].before > made.weight_bytes
    trained = [p for p in model.parameters() if p.requires_grad]
    assert made.grad_bytes == sum(-(-p.nbytes // 512) * 512 for p in trained)
    assert made.work("forward").attention.total() > 0


def test_gradients_that_exist_or_are_freed(triton) -> None:
    model = real_size("llama-3.2-1b")
    new, kept, freed = (
        simulate(model, 1, 512, device=GPU, gradients=x) for x in ("new", "kept", "freed")
    )
    assert freed.grad_bytes == 0
    assert new.grad_bytes == pytest.approx(kept.grad_bytes, rel=0.01)
    assert new.peak_bytes <= new.reserved_bytes
    assert freed.peak_bytes < new.peak_bytes < kept.peak_bytes
    with torch.no_grad():
        made = simulate(model, 1, 512, device=GPU)
    assert made.grad_bytes == 0 and made.work("backward").product_flops == 0
    assert made.peak_bytes < made.weight_bytes + 2**30


def test_work_of_a_step(triton) -> None:
    model = real_size("llama-3-8b")
    made = simulate(model, 2, 1024, device=GPU)
    config, tokens = model.config, 2 * 1024
    in_layers = sum(p.numel() for p in model.layers.parameters() if p.dim() == 2)
    head = config.vocab_size * config.hidden_size
    # The head computes its gradients in forward, or one of them in backward.
    forward, backward = made.work("forward"), made.work("backward")
    assert forward.product_flops + backward.product_flops == 6 * tokens * (in_layers + head)
    pairs = 2 * config.num_attention_heads * 1024 * 1025 // 2
    attention = 4 * pairs * config.head_dim * config.num_hidden_layers
    assert forward.attention.total() == attention
    assert backward.attention.total() == attention * 5 // 2


def test_the_model_stays_as_it_was(triton) -> None:
    model = random_model("llama")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    kernel = triton.glu.glu_forward_kernel
    run = type(kernel).run
    simulate(model, 1, 8, device=GPU)
    assert type(kernel).run is run
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None and p.device == CPU for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
