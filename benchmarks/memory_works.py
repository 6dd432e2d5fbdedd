"""What `benchmarks.memory` measures: models, batches and optimizers, and the settings compared."""

from dataclasses import dataclass, field
from typing import Any

HF, LIGER, OURS = "transformers", "transformers + liger", "ligermodels"
GIB = 2**30


@dataclass(frozen=True)
class Setting:
    """A model, and what its blocks keep for backward.

    Attributes:
        keeps: "all"; "input" (the block is checkpointed); "attention" and "products" (the same, but
            attention's output or every second product stays, by torch's selective checkpointing);
            or "plan".
        blocks: how many blocks, the first ones, are checkpointed. None means all.
        budget: GiB of GPU memory that the plan may take. None means the memory that is free.
        host: GiB of host memory that the plan may take.
        attention: the implementation of attention in transformers.
    """

    implementation: str
    keeps: str = "all"
    blocks: int | None = None
    budget: float | None = None
    host: float = 0
    attention: str = "sdpa"

    @property
    def name(self) -> str:
        if self.keeps == "plan":
            budget = "auto" if self.budget is None else f"{self.budget:g} GiB"
            how = f"plan for {budget}" + f" and {self.host:g} GiB of host memory" * bool(self.host)
        elif self.keeps == "all":
            how = "nothing recomputed"
        else:
            blocks = "every block" if self.blocks is None else f"{self.blocks} blocks"
            kept = {"attention": ", without attention", "products": ", but every second product"}
            how = f"{blocks} checkpointed" + kept.get(self.keeps, "")
        backend = f", {self.attention}" * (self.attention != "sdpa")
        return f"{self.implementation}{backend}: {how}"


def peers(*settings: tuple[str, int | None], attention: str = "sdpa") -> tuple[Setting, ...]:
    """Return Liger's settings from what is kept and the number of checkpointed blocks."""
    return tuple(Setting(LIGER, keeps, blocks, attention=attention) for keeps, blocks in settings)


def plans(*budgets: float | tuple[float, float] | None) -> tuple[Setting, ...]:
    """Return our settings from the budgets in GiB. A pair also has the budget of host memory."""
    pairs = (each if isinstance(each, tuple) else (each, 0) for each in budgets)
    return tuple(Setting(OURS, "plan", budget=budget, host=host) for budget, host in pairs)


@dataclass(frozen=True)
class Work:
    """A model, a batch and an optimizer, with the settings that are compared.

    Attributes:
        settings: those for a GPU of 140 GB. Plain transformers come first.
        small: those for a GPU of 80 GB. Without any, the work is only for the larger one.
        changes: fields of the config that differ from the preset.
        adamw: whether an AdamW step follows backward. All gradients exist then in either case.
        steps, turns: each turn measures every setting for so many steps, after a step to warm up.
        warm_seq: tokens of a row in the step that warms up. None means those of the batch, and
            so does a plan with host memory, which is allocated in the first step.
    """

    family: str
    preset: str
    batch: int
    seq: int
    settings: tuple[Setting, ...]
    small: tuple[Setting, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)
    adamw: bool = True
    steps: int = 2
    turns: int = 2
    warm_seq: int | None = None

    @property
    def name(self) -> str:
        return f"{self.preset}, {self.batch} x {self.seq}" + ", AdamW" * self.adamw

    def settings_for(self, memory: int) -> tuple[Setting, ...]:
        """Return the settings for a GPU of `memory` bytes."""
        return self.settings if memory > 100 * GIB else self.small


BASELINES = (Setting(HF, "input"), Setting(HF), *peers(("input", None), ("attention", None)))
LLAMA = (*BASELINES, *peers(("input", 16), ("all", None)), Setting(OURS, "attention"))
LLAMA_80GB = (*BASELINES, *peers(*(("input", blocks) for blocks in (26, 24, 22, 20, 19))))
LONG = {"max_position_embeddings": 131072}
WORKS = {
    "llama-adamw": Work(
        "llama",
        "llama-3-8b",
        8,
        2048,
        (*LLAMA, *plans(61.5, (61.5, 32), 70, 80, 90, None)),
        (*LLAMA_80GB, Setting(OURS, "attention"), *plans(61.5, (61.5, 32), 70, None)),
    ),
    "llama-32k": Work(
        "llama",
        "llama-3-8b",
        1,
        32768,
        (*peers(("input", None), ("attention", None)), *plans(38, (38, 64), 118)),
        changes=LONG,
        adamw=False,
        turns=1,
    ),
    "llama-131k": Work(
        "llama",
        "llama-3-8b",
        1,
        131072,
        (*peers(("input", None)), *plans(110, (110, 100))),
        changes=LONG,
        adamw=False,
        steps=1,
        turns=1,
        warm_seq=8192,
    ),
    "llama-262k": Work(
        "llama",
        "llama-3-8b",
        1,
        262144,
        plans(None),
        changes={"max_position_embeddings": 262144},
        adamw=False,
        steps=1,
        turns=1,
        warm_seq=8192,
    ),
    "llama-1b-524k": Work(
        "llama",
        "llama-3.2-1b",
        1,
        524288,
        plans(None),
        changes={"max_position_embeddings": 524288},
        adamw=False,
        steps=1,
        turns=1,
        warm_seq=8192,
    ),
    "gemma2-adamw": Work(
        "gemma2",
        "gemma-2-9b",
        4,
        4096,
        (
            Setting(HF, "input", attention="eager"),
            Setting(HF, attention="eager"),
            *peers(("input", None), ("products", None), attention="eager"),
            *peers(("input", None), ("input", 24), ("all", None), attention="flex_attention"),
            Setting(OURS, "products"),
            *plans(80, 100, 120),
        ),
        turns=1,
    ),
}
