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

import trl
from peft import PeftModel
from torch import nn
from transformers import set_seed
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.utils import create_model_from_path

from ligermodels.errors import ConfigError
from ligermodels.integrations.hf_base import LigerPreTrainedModel
from ligermodels.integrations.hf_model import LigerForCausalLM, LigerForSequenceClassification
from ligermodels.integrations.hf_trainer import ResumesWithWords
from ligermodels.integrations.projections import packed_afterwards
from ligermodels.models.base import DecoderModel


def use_loss_head(model: nn.Module) -> bool:
    """Let the loss head answer a model's calls with `fused_lm_head=True`, instead of TRL's head.

    Args: model: a model that TRL's `add_fused_lm_head` was applied to.
    Returns: whether it is a model of this package, which has a loss head.
    Raises:
        ConfigError: TRL's forward has other settings than those of the supported version.
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
    try:
        wrapper.fused_head.temperature = settings["temperature"]
        wrapper.fused_head.cast_to_fp32 = settings["cast_lm_head_to_fp32"]
        wrapper.fused_head.outputs = settings["outputs"]
    except KeyError as error:
        raise ConfigError(
            f"TRL {trl.__version__}: its fused head has no setting {error}; install the version "
            "that ligermodels[trainers] names"
        ) from None
    return True


class _OnLossHead(ResumesWithWords):
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


class LigerGRPOTrainer(_LoadsReference, trl.GRPOTrainer):
    """The GRPO trainer of TRL, on this package's loss head."""


class LigerRLOOTrainer(_LoadsReference, trl.RLOOTrainer):
    """The RLOO trainer of TRL, on this package's loss head."""


class LigerDistillationTrainer(_OnLossHead, trl.DistillationTrainer):
    """The distillation trainer of TRL. Its loss is TRL's own, which takes both heads' weights."""


class LigerRewardTrainer(_OnLossHead, trl.RewardTrainer):
    """The reward trainer of TRL. It trains a `LigerForSequenceClassification`."""

    _model_class = LigerForSequenceClassification
    _load_options: ClassVar[dict[str, Any]] = {"num_labels": 1}
