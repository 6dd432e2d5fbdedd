"""Which backend attention chooses, and each backend against the formula in float64."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ligermodels.layers import attention_backend, attention_mask
from ligermodels.layers.attention_backend import attend, attend_in_parts, choose_backend, prepare
from ligermodels.layers.attention_mask import AttentionMask, document_ids_from_positions
from ligermodels.layers.sequence_shard import SequenceShard
from tests.gpu.synchronisation import no_synchronisation
from tests.layers.formulas import attended
from tests.models.pairs import relative
from tests.pairwise import pairwise

CPU, GPU = torch.device("cpu"), torch.device("cuda")
DOCUMENTS = torch.zeros(1, 600, dtype=torch.int64)
TOKENS = torch.ones(1, 600, dtype=torch.bool)
EVERY_PAIR = torch.ones(1, 1, 600, 600, dtype=torch.bool)
ENDS = {"document_ids": DOCUMENTS, "cu_seqlens": torch.tensor([0, 600]), "max_seqlen": 600}


BOTH = {"causal": False}
PREFIX = {"prefix_lengths": torch.tensor([9])}
PADDING = {"padding_mask": TOKENS, "padding_at_ends": True}

# What the mask and the layer are given, window, cap, dtype, head_dim, and the backend on a GPU.
CHOICES: list[tuple[dict[str, Any], int | None, float | None, torch.dtype, int, str]] = [
    ({}, None, None, torch.bfloat16, 64, "sdpa"),
    ({}, 600, None, torch.bfloat16, 64, "sdpa"),  # the window is as long as the row
    ({}, 599, None, torch.bfloat16, 64, "varlen"),
    ({}, 599, None, torch.float32, 64, "flex"),
    ({}, 599, None, torch.bfloat16, 20, "flex"),
    ({}, 599, None, torch.bfloat16, 512, "wide"),
    ({}, None, None, torch.bfloat16, 320, "wide"),
    ({}, None, None, torch.float32, 512, "sdpa"),
    ({}, None, 50.0, torch.bfloat16, 512, "flex"),
    ({}, None, None, torch.bfloat16, 520, "sdpa"),
    (PADDING | ENDS, 99, None, torch.bfloat16, 512, "wide"),
    ({"keys": 900}, None, None, torch.bfloat16, 512, "wide"),
    ({"mask": EVERY_PAIR}, None, None, torch.bfloat16, 512, "dense"),
    ({}, 599, None, torch.float64, 64, "dense"),
    ({}, None, 50.0, torch.bfloat16, 64, "flex"),
    ({"document_ids": DOCUMENTS}, None, None, torch.bfloat16, 64, "flex"),
    (ENDS, None, None, torch.bfloat16, 64, "varlen"),
    (ENDS, 100, None, torch.bfloat16, 64, "varlen"),
    (ENDS, 100, 50.0, torch.bfloat16, 64, "flex"),
    ({"padding_mask": TOKENS}, None, None, torch.bfloat16, 64, "flex"),
    (PADDING, None, None, torch.bfloat16, 64, "varlen"),
    (PADDING, None, None, torch.float32, 64, "flex"),
    (PADDING, None, 50.0, torch.bfloat16, 64, "flex"),
    (PADDING | ENDS, None, None, torch.bfloat16, 64, "flex"),
    (PADDING | PREFIX, None, None, torch.bfloat16, 64, "flex"),
    (PADDING | BOTH, None, None, torch.bfloat16, 64, "varlen"),
    ({"keys": 900}, None, None, torch.bfloat16, 64, "flex"),
    ({"mask": EVERY_PAIR}, None, None, torch.bfloat16, 64, "dense"),
    (PREFIX, None, None, torch.bfloat16, 64, "flex"),
    (BOTH, None, None, torch.bfloat16, 64, "sdpa"),
    (BOTH | PREFIX, None, None, torch.bfloat16, 64, "sdpa"),  # the prefix shows nothing new
    (BOTH | {"keys": 900}, None, None, torch.float32, 64, "sdpa"),  # keys of another sequence
    (BOTH, 599, None, torch.bfloat16, 64, "varlen"),
    (BOTH, 599, None, torch.float32, 64, "flex"),
    (BOTH, None, 50.0, torch.bfloat16, 64, "flex"),
    (BOTH | ENDS, None, None, torch.bfloat16, 64, "varlen"),
    (BOTH | {"document_ids": DOCUMENTS}, None, None, torch.bfloat16, 64, "flex"),
    (BOTH | {"padding_mask": TOKENS}, None, None, torch.bfloat16, 64, "flex"),
]


def test_choice_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, window, softcap, dtype, head_dim, expected in CHOICES:
        mask = AttentionMask(600, **{k: x for k, x in given.items() if k != "causal"})
        options = (window, softcap)
        rest = (dtype, head_dim, 8, given.get("causal", True))
        elsewhere = "flex" if given or window else "sdpa"
        elsewhere = elsewhere if expected == "wide" else None
        case = f"{list(given)}, window {window}, cap {softcap}, {dtype}, head_dim {head_dim}"
        for device, hip, backend in (
            (GPU, None, expected),
            (GPU, "7.0", {"varlen": "flex", "wide": elsewhere}.get(expected, expected)),
            (CPU, None, "sdpa" if "sdpa" in (expected, elsewhere) else "dense"),
        ):
            monkeypatch.setattr(torch.version, "hip", hip)
            assert choose_backend(mask, *options, device, *rest) == backend, f"{device}: {case}"


def test_choice_of_the_backend_with_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    with_window = {"window": 128}
    for device, dtype, head_dim, options, expected in (
        (GPU, torch.bfloat16, 64, {}, "raw"),
        (GPU, torch.bfloat16, 64, {"causal": False}, "raw"),
        (GPU, torch.bfloat16, 256, {}, "varlen"),
        (GPU, torch.bfloat16, 64, with_window, "varlen"),
        (GPU, torch.float32, 64, {}, "flex"),
        (CPU, torch.bfloat16, 64, {}, "raw"),
        (CPU, torch.bfloat16, 64, with_window, "dense"),
    ):
        window = options.get("window")
        rest = device, dtype, head_dim, 8, options.get("causal", True), True
        assert choose_backend(AttentionMask(600), window, None, *rest) == expected
        packed = AttentionMask(600, **ENDS)
        expected = "dense" if device == CPU else "flex" if dtype == torch.float32 else "varlen"
        assert choose_backend(packed, window, None, *rest) == expected


# What is given of each row's tokens.
ROWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "documents": {"packed": True},
    "known documents": {"ends": (0, 30, 31, 77, 80)},
    "padding": {"padded": True},
    "padding at the ends": {"padded": True, "at_ends": True},
    "documents, padding": {"packed": True, "padded": True},
    "prefix": {"prefix": (50, 7)},
    "prefix, padding": {"prefix": (50, 25), "padded": True},
    "prefix, documents": {"prefix": (60,), "packed": True},
}
PLACES = [
    pytest.param(("cpu", torch.float32), id="cpu-float32"),
    pytest.param(("cuda", torch.float32), id="cuda-float32", marks=pytest.mark.gpu),
    pytest.param(("cuda", torch.bfloat16), id="cuda-bfloat16", marks=pytest.mark.gpu),
]


def other_keys_fit(past: int, rows: str, causal: bool, window: int | None) -> bool:
    """Keys before the queries are of a cache; fewer keys than queries, of another sequence."""
    of_another = not causal and window is None
    return past == 0 or (rows in ("plain", "padding") and (past > 0 or of_another))


def split_fits(place: Any, split: bool, rows: str) -> bool:
    """On a GPU each case takes seconds, in which FlexAttention is compiled."""
    on_gpu = rows in ("plain", "known documents", "documents, padding")
    return not split or (rows != "padding at the ends" and (on_gpu or place[0] == "cpu"))


@pairwise(
    other_keys_fit,
    split_fits,
    lambda place, head_dim: (head_dim == 24) == (place[0] == "cpu"),
    lambda split, past: not split or past == 0,  # context parallelism splits whole rows
    place=PLACES,
    rows=ROWS,
    window=[None, 1, 37],
    softcap=[None, 2.0],
    causal=[True, False],
    past=[0, 40, -40],
    head_dim=[24, 128, 256],
    split=[False, True],
    has_sinks=[False, True],
)
def test_values_and_gradients(
    place: Any,
    rows: str,
    window: int | None,
    softcap: float | None,
    causal: bool,
    past: int,
    head_dim: int,
    split: bool,
    has_sinks: bool,
) -> None:
    """With `split`, two ranks' outputs, and the sums of their gradients, are those of the rows."""
    device, dtype = place
    names = ("packed", "padded", "prefix", "ends", "at_ends")
    packed, padded, prefix, ends, at_ends = map(ROWS[rows].get, names)
    keys, batch = 320 if device == "cuda" else 80, 2 if ends is None else 1
    heads, groups, queries, scale = 4, 2, keys - past, 1.7 * head_dim**-0.5
    given: dict[str, Any] = {}
    tokens = torch.ones(batch, keys, dtype=torch.bool, device=device)
    if prefix is not None:
        given["prefix_lengths"] = torch.tensor(prefix, device=device)
    if packed:
        positions = (torch.arange(keys, device=device) % 41)[None]
        given["document_ids"] = document_ids_from_positions(positions)
    if padded:
        tokens[0, :20] = tokens[1, -15:] = False
        given["padding_mask"] = tokens
    if ends is not None:
        cu_seqlens = keys // 80 * torch.tensor(ends, device=device)
        places = torch.searchsorted(cu_seqlens, torch.arange(keys, device=device), right=True)
        given |= {"document_ids": places[None], "cu_seqlens": cu_seqlens}
        given["max_seqlen"] = int(cu_seqlens.diff().max())
    generator = torch.Generator().manual_seed(0)

    def random(count: int, length: int) -> Tensor:
        made = torch.randn(batch, length, count, head_dim, generator=generator)
        return made.to(device, dtype).transpose(1, 2).requires_grad_()

    def attention(q: Tensor, k: Tensor, v: Tensor, part: AttentionMask) -> Tensor:
        options = {"window": window, "softcap": softcap, "causal": causal}
        sinks = made[3] if has_sinks else None
        return attend(q, k, v, part, scale=scale, sinks=sinks, **options)

    q, k, v = random(heads, queries), random(groups, keys), random(groups, keys)
    upstream = random(heads, queries).detach()
    if at_ends:  # the outputs at padding are not specified
        upstream = upstream * tokens[:, None, :, None]
    made = [q, k, v]
    if has_sinks:
        made.append(torch.linspace(-2, 5, heads).to(q).requires_grad_())
    outs, sums = [], [torch.zeros_like(x, dtype=torch.float64) for x in made]
    shards = [SequenceShard(None, 2, rank) for rank in range(2)] if split else [None]
    pieces = [(lambda x: x) if shard is None else partial(shard.split, dim=2) for shard in shards]
    for shard, piece in zip(shards, pieces):
        count = queries if shard is None else queries // 2
        mask = AttentionMask(count, keys, shard=shard, padding_at_ends=bool(at_ends), **given)
        if not at_ends:
            rest = q.device, dtype, head_dim, causal, has_sinks
            prepare(mask, window, softcap, batch, heads, *rest)
        # The kernel of 16-bit types never waits for the host; the compiler of the other one may.
        varlen = at_ends and dtype == torch.bfloat16 and softcap is None
        with no_synchronisation() if varlen else nullcontext():
            out = attend_in_parts(attention, piece(q), k, v, mask, causal)
        outs.append(out.detach())
        for total, grad in zip(sums, torch.autograd.grad(out, made, piece(upstream))):
            total += grad
    wide = [x.detach().double().requires_grad_() for x in made]
    sees = AttentionMask(queries, keys, **given).dense(window, q.device, causal=causal)
    expected = attended(*wide[:3], sees, scale, softcap, wide[3] if has_sinks else None)
    bound = 1.5e-2 if dtype == torch.bfloat16 else 2e-6
    for out, piece in zip(outs, pieces):
        compared = (upstream != 0) if at_ends else torch.ones_like(upstream)
        assert relative(out * piece(compared), piece(expected * compared)) <= bound
    wanted = torch.autograd.grad(expected, wide, upstream.double())
    for name, total, want in zip("qkvs", sums, wanted):
        if want.norm() > 1e-9:
            assert relative(total, want) <= bound, name
        else:  # in a window of one, the only weight is 1 for any score
            assert total.norm() < 1e-2, name


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_query_that_sees_nothing_gives_zeros(softcap: float | None) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 5, 8).requires_grad_().unbind(0)
    tokens = torch.tensor([[0, 0, 1, 1, 1]])
    mask = AttentionMask(5, padding_mask=tokens)
    out = attend(q, k, v, mask, scale=0.5, softcap=softcap)
    assert (out[:, :, :2] == 0).all() and (out[:, :, 2:] != 0).all()
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert grad.isfinite().all() and (grad[:, :, :2] == 0).all()


def test_a_mask_of_other_sizes_is_refused() -> None:
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
    tokens = torch.ones(3, 5, dtype=torch.bool)
    for mask, keys, complaint in (
        (AttentionMask(4), k[:, :, :5], "made for 4 queries and 4 keys, but there are 5 queries"),
        (AttentionMask(5), k, "5 queries and 5 keys, but there are 5 queries and 7 keys in 2 rows"),
        (AttentionMask(5, padding_mask=tokens), k[:, :, :5], "5 keys in 3 rows, but .* in 2 rows"),
    ):
        with pytest.raises(ValueError, match=complaint):
            attend(q, keys, keys, mask, scale=1.0)


@pytest.mark.gpu
def test_many_lengths_compile_few_times() -> None:
    """Beyond a limit of recompilations, FlexAttention would silently compute every score."""
    from torch._dynamo.utils import counters

    heads, groups, head_dim = 4, 2, 64
    lengths = [130, 257, 300, 311, 400, 401, 512, 640, 700, 801, 1000, 1024, 1111, 1300]
    for length in lengths:
        q, k, v = (
            torch.randn(1, n, length, head_dim, device="cuda", dtype=torch.bfloat16)
            for n in (heads, groups, groups)
        )
        mask = AttentionMask(length)
        attend(q.requires_grad_(), k, v, mask, scale=0.1, window=100, softcap=5.0)
        if length == 311:
            before = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == before, "each length compiles anew, which is slow"


LONG: list[tuple[torch.dtype, int, dict[str, Any]]] = [
    *((torch.bfloat16, 64, {"window": 4096} | x) for x in ({}, PADDING, {"softcap": 50.0})),
    *((torch.bfloat16, 64, {"softcap": 50.0} | x) for x in ({}, {"padding_mask": TOKENS})),
    *((torch.float32, 64, BOTH | x) for x in ({}, {"window": 512}, {"softcap": 50.0})),
    (torch.bfloat16, 64, BOTH | {"window": 512}),
    (torch.float32, 64, {}),
    (torch.bfloat16, 320, {}),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "head_dim", "options"), LONG)
def test_no_mask_and_no_scores_of_every_pair_at_length(
    dtype: torch.dtype, head_dim: int, options: dict[str, Any]
) -> None:
    length, options = 16384, dict(options)
    given = {name: options.pop(name) for name in [*options] if name.startswith("padding")}
    if given:
        tokens = torch.ones(1, length, device="cuda", dtype=torch.long)
        tokens[:, :100] = 0
        given["padding_mask"] = tokens
    q, k = (
        torch.randn(1, n, length, head_dim, device="cuda", dtype=dtype, requires_grad=True)
        for n in (8, 2)
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(q, k, k, AttentionMask(length, **given), scale=0.1, **options).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 4 * length * length


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_flex_attention_gives_what_a_dense_mask_gives(
    softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlexAttention runs on a CPU without a compiler and without gradients."""
    q, k, v = (torch.randn(2, heads, 9, 16) for heads in (4, 2, 2))
    monkeypatch.setattr(attention_backend, "compiled", lambda function: function)
    monkeypatch.setattr(attention_mask, "compiled", lambda function: function)
    sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0]) if softcap is None else None
    for window, causal in ((None, True), (4, True), (None, False)):
        mask, results = AttentionMask(9), []
        options = {"scale": 0.3, "window": window, "softcap": softcap, "causal": causal}
        for backend in ("flex", "dense"):
            monkeypatch.setattr(attention_backend, "choose_backend", lambda *_, b=backend: b)
            attention_backend.prepare(mask, window, softcap, 2, 4, q.device, q.dtype, 16, causal)
            with torch.no_grad():
                results.append(attend(q, k, v, mask, sinks=sinks, **options))
        assert relative(*results) <= 1e-6, (window, causal)


def test_the_compiled_output_with_sinks_is_the_eager_one() -> None:
    torch.manual_seed(0)
    sizes = (2, 3, 7, 4), (2, 3, 7), (3,)
    inputs = [torch.randn(*size, requires_grad=True) for size in sizes]
    upstream = torch.randn(2, 3, 7, 4)
    compiled = torch.compile(attention_backend.sunk, fullgraph=True, backend="aot_eager")
    made = [run(*inputs) for run in (attention_backend.sunk, compiled)]
    torch.testing.assert_close(*made)
    torch.testing.assert_close(*(torch.autograd.grad(x, inputs, upstream) for x in made))
    torch.library.opcheck(torch.ops.ligermodels.sunk, inputs)
    torch.library.opcheck(torch.ops.ligermodels.in_memory, (torch.arange(5),))
