"""The losses by name: one class for each, which has its options and refuses what does not fit.

What a loss computes is an objective in another module, which `Loss.objective` imports. This module
does not import torch, so that the command line shows its help quickly. The formulas are those of
`ligermodels.losses`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import Any, ClassVar

from ligermodels.errors import ConfigError
from ligermodels.training.options import Options, option

LOSSES: dict[str, type[Loss]] = {}  # by name
DPO_TYPES = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot"),
    *("aot_unpaired", "apo_zero", "apo_down", "discopop", "sigmoid_norm", "sft"),
)
GRPO_TYPES = ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")
DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
_SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")
_RATE: dict[str, Any] = {"at_least": 0, "less_than": 0.5}
_SHARE: dict[str, Any] = {"at_least": 0, "at_most": 1}


@dataclass(kw_only=True)
class Loss(Options):
    """What a run minimises. A class with a name is found by it: `class Mine(Loss, name="mine")`.

    Its docstring is its help: the first line says what it is and what its data are.

    Attributes:
        name: the name on the command line and in run.yaml.
        computed_by: the module of this package, and in it the class that computes the loss.
        packed: whether it learns from documents that are packed into rows. Others compare whole
            completions.
        splits_rows: whether several processes may compute parts of a row.
        splits_experts: whether they may each have some of the experts.
        classifies: whether the model gives each text a number, and no tokens.
        learning_rate: the default of the peak learning rate, that of TRL's trainer.
        fixed: options of the formula that the loss does not leave to the user.
    """

    name: ClassVar[str]
    computed_by: ClassVar[str]
    packed: ClassVar[bool] = False
    splits_rows: ClassVar[bool] = False
    splits_experts: ClassVar[bool] = False
    classifies: ClassVar[bool] = False
    learning_rate: ClassVar[float] = 2e-5
    fixed: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, name: str | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        if name is not None:
            cls.name = name
            LOSSES[name] = cls

    def check(self, config: Any) -> None:
        """Check the options of this loss with those of the other subjects.

        Raises:
            ConfigError: the loss cannot be used with one of them.
        """
        for name in () if self.packed else ("stream", "data_weights"):
            if getattr(config.data, name):
                raise ConfigError(f"{name}: this is for packed documents, not for {self.name}")
        if self.packed and config.schedule.group_by_length:
            raise ConfigError(
                f"group_by_length: {self.name} packs documents into full rows, which have no "
                "padding to save; leave it out"
            )
        for name, can, needs in (
            ("context_parallel", self.splits_rows, "rows"),
            ("expert_parallel", self.splits_experts, "models"),
        ):
            if getattr(config.parallel, name) > 1 and not can:
                raise ConfigError(
                    f"{name}: this cannot be combined with the loss {self.name}, which needs whole "
                    f"{needs}; leave one out"
                )

    def objective(self, config: Any) -> Any:
        """Return the `Objective` that computes the loss in a run with this config."""
        module, name = self.computed_by.split(":")
        return getattr(import_module(f"ligermodels.training.{module}"), name)(config)

    def formula_options(self, formula: Callable[..., Any]) -> dict[str, Any]:
        """Return the options that a formula takes, if they are set; it has defaults for others."""
        given = {name: getattr(self, name, None) for name in signature(formula).parameters}
        return {name: value for name, value in given.items() if value is not None} | self.fixed


@dataclass(kw_only=True)
class SFT(Loss, name="sft"):
    """The loss of the next token: text, prompt and completion, or messages.

    Attributes:
        loss_type: variant of the loss, named as in TRL
        label_smoothing: share of the target that is spread over the whole vocabulary; for nll
        neftune_noise_alpha: add noise of this size to the embeddings (NEFTune, arXiv:2310.05914)
    """

    computed_by = "objectives:Objective"
    packed = True
    splits_rows = splits_experts = True

    loss_type: str = option("nll", choices=("nll", "dft", "focal"))
    label_smoothing: float = option(0.0, at_least=0, less_than=1)
    neftune_noise_alpha: float | None = option(None, more_than=0)

    def check(self, config: Any) -> None:
        """Refuse label smoothing for the variants whose formula has none."""
        super().check(config)
        if self.label_smoothing and self.loss_type != "nll":
            raise ConfigError(f"label_smoothing: this is for loss_type nll, not {self.loss_type}")


@dataclass(kw_only=True)
class DPO(Loss, name="dpo"):
    """Direct preference optimization (Rafailov et al. 2023): prompt, chosen and rejected.

    Attributes:
        loss_type: variant of the loss, named as in TRL
        beta: how strongly the model is held to the one it starts from
        label_smoothing: rate of wrong preferences
        f_divergence_type: divergence from the reference model
        f_alpha_divergence_coef: the coefficient of alpha_divergence (default: 0.5)
        discopop_tau: the temperature of discopop (default: 0.05)
        ld_alpha: weight of the tokens beyond the length of a pair's shorter completion
        use_weighting: weight each pair by its probability under the model (WPO)
    """

    computed_by = "preferences:DPOObjective"
    learning_rate = 1e-6
    splits_experts = True

    loss_type: str = option("sigmoid", choices=DPO_TYPES)
    beta: float = option(0.1, more_than=0)
    label_smoothing: float = option(0.0, only_for={"loss_type": _SMOOTHED}, **_RATE)
    f_divergence_type: str = option("reverse_kl", choices=DIVERGENCES)
    f_alpha_divergence_coef: float | None = option(
        None, only_for={"f_divergence_type": ("alpha_divergence",)}
    )
    discopop_tau: float | None = option(None, more_than=0, only_for={"loss_type": ("discopop",)})
    ld_alpha: float | None = option(None, **_SHARE)
    use_weighting: bool = option(False)


@dataclass(kw_only=True)
class KTO(Loss, name="kto"):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024): prompt, completion and label.

    Attributes:
        loss_type: variant of the loss, named as in TRL
        beta: how strongly the model is held to the one it starts from
        desirable_weight: factor of desirable examples
        undesirable_weight: factor of the other examples
    """

    computed_by = "preferences:KTOObjective"
    learning_rate = 1e-6
    splits_experts = True

    loss_type: str = option("kto", choices=("kto", "apo_zero_unpaired"))
    beta: float = option(0.1, more_than=0)
    desirable_weight: float = option(1.0, at_least=0)
    undesirable_weight: float = option(1.0, at_least=0)


@dataclass(kw_only=True)
class ORPO(Loss, name="orpo"):
    """Odds ratio preference optimization (Hong et al. 2024): prompt, chosen and rejected.

    Attributes:
        beta: the weight of the odds ratio
    """

    computed_by = "preferences:ORPOObjective"
    learning_rate = 1e-6
    splits_experts = True

    beta: float = option(0.1, at_least=0)


@dataclass(kw_only=True)
class CPO(Loss, name="cpo"):
    """Contrastive preference optimization (Xu et al. 2024): prompt, chosen and rejected.

    Attributes:
        loss_type: variant of the loss, named as in TRL
        beta: the scale of the margin
        label_smoothing: rate of wrong preferences
    """

    computed_by = "preferences:CPOObjective"
    learning_rate = 1e-6
    splits_experts = True

    loss_type: str = option("sigmoid", choices=("sigmoid", "hinge", "ipo"))
    beta: float = option(0.1, more_than=0)
    label_smoothing: float = option(0.0, only_for={"loss_type": ("sigmoid",)}, **_RATE)


@dataclass(kw_only=True)
class SimPO(Loss, name="simpo"):
    """Simple preference optimization (Meng et al. 2024): prompt, chosen and rejected.

    Attributes:
        beta: the scale of the margin
        simpo_gamma: the margin that is asked for
        label_smoothing: rate of wrong preferences
    """

    computed_by = "preferences:CPOObjective"
    learning_rate = 1e-6
    splits_experts = True
    fixed = {"loss_type": "simpo", "cpo_alpha": 0.0}  # noqa: RUF012 (of the class, not of a run)

    beta: float = option(0.1, more_than=0)
    simpo_gamma: float = option(0.5, at_least=0)
    label_smoothing: float = option(0.0, **_RATE)


@dataclass(kw_only=True)
class Reward(Loss, name="reward"):
    """A reward model, of a number for each text: prompt, chosen and rejected, and perhaps margin.

    Attributes:
        center_rewards_coefficient: weight of a term that keeps the rewards near 0
    """

    computed_by = "preferences:RewardObjective"
    learning_rate = 1e-4
    classifies = True

    center_rewards_coefficient: float | None = option(None, at_least=0)

    def check(self, config: Any) -> None:
        """Refuse what needs a model that writes text."""
        super().check(config)
        for name, value in (
            ("sample_prompts", config.output.sample_prompts),
            ("eval_tasks", config.data.eval_tasks),
        ):
            if value:
                raise ConfigError(f"{name}: a reward model writes no text; leave it out")


@dataclass(kw_only=True)
class GRPO(Loss, name="grpo"):
    """Group relative policy optimization (Shao et al. 2024): prompt, and keys for the reward.

    Attributes:
        loss_type: variant of the loss, named as in TRL
        beta: how strongly the model is held to the one it starts from, of which a copy is in memory
            then, or the model with its adapters off
        reward_function: the reward, as FILE.py:NAME or MODULE:NAME; it is called with prompts,
            completions and the other keys of the data, each a list, and returns a list of numbers
        num_generations: completions that are sampled for a prompt
        max_completion_length: most tokens of a sampled completion
        generation_batch_size: completions that a process samples together, at least those of a
            prompt, whose cache must fit into memory (default: those of a step, at most 64)
        temperature: temperature of the samples
        epsilon_high: how far above 1 ratios are clipped; for cispo the largest ratio
    """

    computed_by = "grpo:GRPOObjective"
    learning_rate = 1e-6

    loss_type: str = option("dapo", choices=GRPO_TYPES)
    beta: float = option(0.0, at_least=0)
    reward_function: str | None = option(None)
    num_generations: int = option(8, at_least=2)
    max_completion_length: int = option(256, at_least=1)
    generation_batch_size: int | None = option(None, at_least=2)
    temperature: float = option(1.0, more_than=0)
    epsilon_high: float | None = option(None, more_than=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward_function is None:
            raise ConfigError("reward_function: grpo needs one (--reward-function FILE.py:NAME)")
        if self.loss_type == "cispo" and self.epsilon_high is None:
            raise ConfigError("epsilon_high: cispo needs it, the largest ratio, for example 5.0")

    def check(self, config: Any) -> None:
        """Check that a step holds whole groups."""
        super().check(config)
        completions = config.schedule.batch_size * config.schedule.gradient_accumulation_steps
        if completions % self.num_generations:
            raise ConfigError(
                "num_generations: must divide the completions of a step, batch_size * "
                f"gradient_accumulation_steps = {completions}, but is {self.num_generations}"
            )


@dataclass(kw_only=True)
class Distillation(Loss, name="distillation"):
    """The divergence from a teacher (GKD, Agarwal et al. 2023): data as for sft.

    Attributes:
        teacher: hub id or local folder of the teacher, a model with the same tokenizer
        beta: 0: KL(teacher || model); 1: KL(model || teacher); between them the generalized
            Jensen-Shannon divergence
        temperature: temperature of both distributions
        distill_weight: share of the divergence in the loss; the rest is the loss of the next token
    """

    computed_by = "distillation:DistillationObjective"
    packed = True

    teacher: str | None = option(None)
    beta: float = option(0.5, **_SHARE)
    temperature: float = option(1.0, more_than=0)
    distill_weight: float = option(1.0, more_than=0, at_most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher is None:
            raise ConfigError("teacher: distillation needs one (--teacher MODEL)")
