"""TRL's trainers on the models of `hf_model`, with the loss head in the place of TRL's own.

In its constructor, a trainer of TRL gives its model another forward, which answers calls with
`fused_lm_head=True` by TRL's head. The trainers here take that forward away again and hand its
settings to the model, whose `FusedHead` answers instead. On another model they are TRL's trainers.
Nothing in TRL is changed.
"""

import copy
import inspect
from contextlib import nullcontext
from typing import Any, ClassVar

from ligermodels.integrations import require

require("trl", "peft", "transformers")

import torch
import torch.nn.functional as F
import trl
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import set_seed
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.utils import create_model_from_path

from ligermodels.errors import ConfigError
from ligermodels.integrations.hf_base import LigerPreTrainedModel
from ligermodels.integrations.hf_model import LigerForCausalLM, LigerForSequenceClassification
from ligermodels.integrations.projections import packed_afterwards
from ligermodels.models.base import DecoderModel
from ligermodels.models.kernel_report import decoding_obstacle


def use_loss_head(model: nn.Module) -> bool:
    """Let the loss head answer a model's calls with `fused_lm_head=True`, instead of TRL's head.

    Args: model: a model that TRL's `add_fused_lm_head` was applied to.
    Returns: whether it is a model of this package, which has a loss head.
    """
    wrapper = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(wrapper, LigerForCausalLM):
        return False
    # accelerate puts autocast around the forward of a reference model.
    forward = wrapper.__dict__.pop("forward", None)
    forward = wrapper.__dict__.pop("_original_forward", forward)
    if forward is None:
        return False
    settings = inspect.getclosurevars(forward.__func__).nonlocals
    wrapper.fused_head.temperature = settings["temperature"]
    wrapper.fused_head.cast_to_fp32 = settings["cast_lm_head_to_fp32"]
    wrapper.fused_head.outputs = settings["outputs"]
    return True


class _OnLossHead:
    """The methods that the trainers have in common; it comes before TRL's class."""

    _model_class: Any = LigerForCausalLM
    _load_options: ClassVar[dict[str, Any]] = {}
    # Attributes of TRL's classes:
    model: Any
    ref_model: Any
    accelerator: Any
    args: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        if isinstance(given["model"], str):
            given["model"] = self._load(given["model"], given)
        if isinstance(given["model"], DecoderModel):
            raise ConfigError(
                f"{type(self).__name__}: TRL needs the interface of transformers' models, which a "
                "native model does not have; pass LigerForCausalLM.from_native(model)"
            )
        own = isinstance(given["model"], LigerPreTrainedModel)
        if own and getattr(given.get("args"), "use_liger_kernel", False):
            raise ConfigError(
                "use_liger_kernel=True would put Liger's modules in the place of this model's own "
                "fused layers; leave it out"
            )
        reference = self._reference(given)
        adapts = own and given.get("peft_config") is not None
        try:
            with packed_afterwards(given["model"]) if adapts else nullcontext():
                super().__init__(**given)
        finally:
            self._restore()
        use_loss_head(self.model)
        if reference is not None:
            self._add(reference)
        elif (reference := getattr(self, "ref_model", None)) is not None:
            if use_loss_head(self.accelerator.unwrap_model(reference)):
                self.ref_model = self._prepared(reference)

    def _load(self, path: str, given: dict[str, Any]) -> Any:
        """Return the model at a path or hub id, as TRL would load it: in float32 by default."""
        args = given.get("args")
        set_seed(42 if args is None else args.seed)  # a new head has random values
        options = self._load_options | (getattr(args, "model_init_kwargs", None) or {})
        if given.get("quantization_config") is not None:
            options["quantization_config"] = given.pop("quantization_config")
            # Rows of a quantised projection cannot be taken out for adapters later.
            options.setdefault("split_projections", given.get("peft_config") is not None)
        options.setdefault("device_map", None)
        return create_model_from_path(path, self._model_class, **options)

    def _reference(self, given: dict[str, Any]) -> Any:
        """Return a reference model for `_add`, or change the arguments of TRL's constructor."""
        return None

    def _restore(self) -> None:
        """Take back what `_reference` has changed of the user's arguments."""

    def _add(self, reference: Any) -> None:
        """Make use of a reference model, which TRL's constructor has not seen."""
        self.ref_model = self._prepared(reference)

    def _prepared(self, reference: Any) -> Any:
        """Return a reference model on its device and under autocast."""
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:  # type: ignore[attr-defined]
            return reference  # TRL has sharded it
        reference._is_accelerate_prepared = False
        return self.accelerator.prepare_model(reference, evaluation_mode=True)


class _TakesReference(_OnLossHead):
    """Its default reference model is a copy of the model, and not one that TRL loads."""

    def _reference(self, given: dict[str, Any]) -> None:
        model, args = given["model"], given.get("args")
        precomputed = getattr(args, "precompute_ref_log_probs", False)
        if given.get("ref_model") is None and not precomputed and not _is_adapted(given):
            given["ref_model"] = copy.deepcopy(model).requires_grad_(False)


class _LoadsReference(_OnLossHead):
    """With a beta, its reference model is a copy of the model, and not one that TRL loads.

    TRL's constructor has no argument for one. It loads none if beta is 0, so it gets that.
    """

    _changed: Any = None  # the arguments, their beta and their sync_ref_model

    def _reference(self, given: dict[str, Any]) -> Any:
        args = given.get("args")
        if args is None or args.beta == 0.0 or _is_adapted(given):
            return None
        if args.deepspeed or args.fsdp or getattr(args, "cast_lm_head_to_fp32", False):
            return None  # TRL's constructor has its own ways for these
        reference = copy.deepcopy(given["model"]).requires_grad_(False)
        self._changed = args, args.beta, args.sync_ref_model
        args.beta, args.sync_ref_model = 0.0, False
        return reference

    def _restore(self) -> None:
        if self._changed is not None:
            args, args.beta, args.sync_ref_model = self._changed

    def _add(self, reference: Any) -> None:
        super()._add(reference)
        self.beta = self.args.beta
        policy = self.accelerator.unwrap_model(self.model)
        reference.fused_head = copy.copy(policy.fused_head)
        reference.fused_head.outputs = ("log_probs",)
        if self.args.sync_ref_model:
            callback = SyncRefModelCallback(self.ref_model, self.accelerator)
            self.add_callback(callback)  # type: ignore[attr-defined]


class _SamplesNatively(_LoadsReference):
    """It samples with the native model's `generate_many`, with the weights that it trains.

    The log-probabilities of the sampler are compared with those that TRL computes for the policy
    that has sampled, under the name that TRL has for vLLM.
    """

    _takes_log_probs = True  # whether TRL's class asks for those of the sampler
    _sampled: Any = None  # log-probabilities of the last samples, a list for each
    _scored: Any = None  # those that the policy had when TRL computed them last

    def _generate_single_turn(
        self, prompts: list[list[int]], images: Any, fields: Any, *more: Any, **options: Any
    ) -> Any:
        trl_trainer: Any = self
        args, wrapper = self.args, self.accelerator.unwrap_model(self.model)
        self._sampled = None
        if (
            not isinstance(wrapper, LigerForCausalLM)
            or trl_trainer.use_vllm
            or trl_trainer.use_transformers_continuous_batching
            or args.generation_kwargs
            or args.cache_implementation
            or images
            or fields
            or decoding_obstacle(wrapper.native, captures=False) is not None
        ):
            theirs: Any = super()
            return theirs._generate_single_turn(prompts, images, fields, *more, **options)
        training = self.model.training
        count = trl_trainer.num_generations if training else trl_trainer.num_generations_eval
        if prompts != [ids for ids in prompts[::count] for _ in range(count)]:
            count = 1  # this process has parts of groups
        wrapper.eval()
        found = wrapper.native.generate_many(
            prompts[::count],
            args.max_completion_length,
            num_samples=count,
            return_log_probs=True,
            do_sample=True,
            temperature=args.temperature,
            top_k=args.top_k or None,
            top_p=args.top_p,
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
            eos_token_id=trl_trainer.eos_token_ids,
        )
        completions, sampled = zip(*((ids.tolist(), values.tolist()) for ids, values in found))
        wrapper.train(training)
        self._sampled = [*sampled]
        return ([*completions], self._sampled) if self._takes_log_probs else [*completions]

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        made = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)  # type: ignore[misc]
        if model is not self.ref_model:
            self._scored = made[0].detach()
        return made

    def _log_difference(self, scored: Tensor, sampled: Tensor, mask: Tensor) -> None:
        """Log the mean and the largest absolute difference where the mask is true, (rows, new)."""
        difference = torch.where(mask.bool(), (scored - sampled).abs(), 0.0)
        made = torch.stack([difference.sum(), mask.sum(), difference.max()])
        totals, counts, largest = self.accelerator.gather(made[None]).unbind(1)
        metrics = self._metrics["train" if self.model.training else "eval"]  # type: ignore[attr-defined]
        name = "sampling/sampling_logp_difference"
        metrics[f"{name}/mean"].append((totals.sum() / counts.sum().clamp(min=1)).item())
        metrics[f"{name}/max"].append(largest.max().item())


def _is_adapted(given: dict[str, Any]) -> bool:
    """Return whether the reference is the model without its adapter, or of another package."""
    is_ours = isinstance(given["model"], LigerForCausalLM)
    return given.get("peft_config") is not None or not is_ours


class LigerSFTTrainer(_OnLossHead, trl.SFTTrainer):
    """The SFT trainer of TRL, on this package's loss head."""


class LigerDPOTrainer(_TakesReference, trl.DPOTrainer):
    """The DPO trainer of TRL, on this package's loss head."""


class LigerKTOTrainer(_TakesReference, trl.KTOTrainer):
    """The KTO trainer of TRL, on this package's loss head."""


class LigerGRPOTrainer(_SamplesNatively, trl.GRPOTrainer):
    """The GRPO trainer of TRL, on this package's loss head and sampler."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)
        if self._sampled is not None and "sampling_per_token_logps" in inputs:
            mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
            # TRL has these if the policy has changed since it sampled.
            scored = inputs.get("old_per_token_logps", self._scored)
            self._log_difference(scored, inputs["sampling_per_token_logps"], mask)
        return loss


class LigerRLOOTrainer(_SamplesNatively, trl.RLOOTrainer):
    """The RLOO trainer of TRL, on this package's loss head and sampler."""

    _takes_log_probs = False

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        made = super()._generate_and_score_completions(inputs)
        if self._sampled is not None:
            rows = [torch.tensor(each, device=self._scored.device) for each in self._sampled]
            sampled = pad_sequence(rows, batch_first=True)
            sampled = F.pad(sampled, (0, self._scored.shape[1] - sampled.shape[1]))
            self._log_difference(self._scored, sampled, made["completion_mask"])
        return made


class LigerDistillationTrainer(_OnLossHead, trl.DistillationTrainer):
    """The distillation trainer of TRL. Its loss is TRL's own, which takes both heads' weights."""


class LigerRewardTrainer(_OnLossHead, trl.RewardTrainer):
    """The reward trainer of TRL. It trains a `LigerForSequenceClassification`."""

    _model_class = LigerForSequenceClassification
    _load_options: ClassVar[dict[str, Any]] = {"num_labels": 1}
