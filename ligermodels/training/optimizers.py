"""Optimizers by name, and the parameters that they train.

A checkpoint holds what an optimizer keeps in `state` for each parameter. `allocate_state` gives a
fresh optimizer that state, so that a checkpoint can be copied into it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib import import_module
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.adapters import LoraLinear
from ligermodels.adapters.adapted_model import module_at
from ligermodels.adapters.peft_format import expert_linears, linears
from ligermodels.errors import ConfigError, did_you_mean
from ligermodels.kernels.adamw import AdamW
from ligermodels.layers.fusion import is_sharded
from ligermodels.models.base import DecoderModel
from ligermodels.training.config import OptimizerOptions

Groups = list[dict[str, Any]]
_MUON_MOMENTUM = 0.95


def freeze(model: nn.Module, patterns: Sequence[str], *, only: bool = False) -> None:
    """Freeze the parameters whose names match a pattern.

    A pattern is the name of a parameter or of a module, such as `embed_tokens` or `layers.0.mlp`,
    in which `*` and `[0-3]` stand for others.

    Args: only: whether to train what the patterns name, and freeze everything else.
    Raises:
        ConfigError: a pattern matches nothing, or nothing is left to train.
    """
    option = "train_only" if only else "freeze"
    matched = {name for pattern in patterns for name in _matching(model, pattern, option)}
    for name, parameter in model.named_parameters():
        if (name in matched) != only:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"{option}: nothing is left to train")


def _matching(model: nn.Module, pattern: str, option: str) -> set[str]:
    """Return the names of the parameters that a pattern matches, as in `freeze`.

    Raises:
        ConfigError: there are none.
    """
    names = {  # of each parameter: its own name, and those of the modules around it
        name: [name, *(name[:i] for i, letter in enumerate(name) if letter == ".")]
        for name, _ in model.named_parameters()
    }
    found = {n for n, around in names.items() if any(fnmatchcase(x, pattern) for x in around)}
    if not found:
        hint = did_you_mean(pattern, {*chain.from_iterable(names.values())})
        known = ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
        raise ConfigError(
            f"{option}: {pattern!r} matches no parameter of the model, which has {known}{hint}"
        )
    return found


def _with_factors(groups: Groups, model: nn.Module, factors: Sequence[str]) -> Groups:
    """Return the groups, divided by the factors of the learning rate: `NAME=FACTOR`, the last wins.

    Raises:
        ConfigError: a factor is not a positive number, or a name matches nothing that is trained.
    """
    parameters = dict(model.named_parameters())
    found: dict[nn.Parameter, float] = {}
    named: dict[str, list[nn.Parameter]] = {}
    for each in factors:
        pattern, _, text = each.rpartition("=")
        try:
            factor = float(text)
        except ValueError:
            factor = 0.0
        if not pattern or not 0 < factor < float("inf"):
            raise ConfigError(f"lr_factors: {each!r}; expected NAME=FACTOR, as in embed_tokens=0.1")
        named[each] = [parameters[name] for name in _matching(model, pattern, "lr_factors")]
        found |= dict.fromkeys(named[each], factor)
    if frozen := [each for each in factors if not any(p.requires_grad for p in named[each])]:
        raise ConfigError(f"lr_factors: {frozen[0]!r} names only parameters that are frozen")
    made: Groups = []
    for group in groups:
        by_factor: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_factor.setdefault(found.get(parameter, 1.0), []).append(parameter)
        made += [group | {"params": ps, "lr_factor": f} for f, ps in by_factor.items()]
    return made


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> Groups:
    """Return groups of parameters: only matrices decay, not norm weights or biases."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def decoder_of(module: nn.Module) -> DecoderModel:
    """Return the model in a module that may have heads besides."""
    return next(each for each in module.modules() if isinstance(each, DecoderModel))


def make_optimizer(model: nn.Module, options: OptimizerOptions) -> torch.optim.Optimizer:
    """Return the optimizer that is asked for, of the parameters that are not frozen.

    Its learning rate has to be set before each step.

    Raises:
        ConfigError: it needs a package that is not installed, or a factor of the learning rate is
            wrong.
    """
    adam: dict[str, Any] = {
        "betas": (options.adam_beta1, options.adam_beta2),
        "eps": options.adam_epsilon,
    }
    if options.name == "muon":
        if options.lr_factors:
            raise ConfigError("lr_factors: muon has one learning rate for all; use another one")
        return _muon(model, options.weight_decay, adam)
    groups = parameter_groups(model.parameters(), options.weight_decay)
    if options.lr_factors:
        groups = _with_factors(groups, model, options.lr_factors)
    if options.name == "adafactor":
        return torch.optim.Adafactor(groups)
    if options.name == "adamw":
        return AdamW(groups, **adam)
    try:
        optimizers = import_module("torchao.optim")
    except ImportError as error:
        raise ConfigError(
            f"optimizer: adamw_8bit needs torchao, which cannot be imported ({error}); "
            "pip install torchao"
        ) from None
    return optimizers.AdamW8bit(groups, **adam)


def _muon(model: nn.Module, weight_decay: float, adam_options: dict[str, Any]) -> Muon:
    decoder = decoder_of(model)
    rows = _rows_of_projections(decoder)
    matrices = {
        parameter: rows.get(parameter, [slice(None)])
        for name, parameter in decoder.named_parameters()
        if name.startswith("layers.") and parameter.ndim == 2 and parameter.requires_grad
    }
    others = [p for p in model.parameters() if p not in matrices]
    groups = parameter_groups(others, weight_decay)
    return Muon(matrices, groups, weight_decay=weight_decay, **adam_options)


def _rows_of_projections(model: DecoderModel) -> dict[nn.Parameter, list[slice]]:
    """Return, for each weight and each factor of an adapter, the rows of each projection of HF."""
    found: dict[nn.Parameter, list[slice]] = {}
    weight_map = model.weight_map(model.built_from)
    for name, parts in (linears(weight_map) | expert_linears(weight_map)).items():
        linear = module_at(model, name)
        if isinstance(linear, LoraLinear):
            found[linear.lora_a] = _cuts([linear.rank] * len(linear.parts))
            found[linear.lora_b] = _cuts([part.size for part in linear.parts])
        elif isinstance(weight := getattr(linear, "weight", None), nn.Parameter):
            found[weight] = [part.rows.slice for part in parts]
    return found


def _cuts(sizes: list[int]) -> list[slice]:
    """Return slices of these sizes, one after the other."""
    return [slice(*ends) for ends in pairwise(accumulate(sizes, initial=0))]


class Muon(torch.optim.Optimizer):
    """Muon for matrices, and AdamW for everything else.

    Each projection is made orthogonal by itself, also where the model has several packed into one
    parameter. The updates have the size of AdamW's (`match_rms_adamw`), so that both take one
    learning rate.

    Args:
        matrices: for each parameter, the rows of each of its projections.
        others: groups of the other parameters.
    Attributes:
        inner_optimizers: torch's Muon for the projections, and AdamW for the others.
    """

    def __init__(
        self,
        matrices: Mapping[nn.Parameter, Sequence[slice]],
        others: Groups,
        *,
        weight_decay: float,
        **adam_options: Any,
    ) -> None:
        self._pieces = [
            (p, rows, p.detach()[rows]) for p, cuts in matrices.items() for rows in cuts
        ]
        self._muon: Any = None
        self._adamw: Any = None
        if matrices:
            self._muon = torch.optim.Muon(
                [view for *_, view in self._pieces],
                weight_decay=weight_decay,
                momentum=_MUON_MOMENTUM,
                adjust_lr_fn="match_rms_adamw",
            )
        if others:
            self._adamw = AdamW(others, **adam_options)
        self.inner_optimizers = [x for x in (self._muon, self._adamw) if x is not None]
        groups = [{"params": list(matrices)}, *({"params": each["params"]} for each in others)]
        super().__init__([group for group in groups if group["params"]], {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient. A closure is not supported."""
        assert closure is None
        for parameter, rows, view in self._pieces:
            view.grad = None if parameter.grad is None else parameter.grad[rows]
        for optimizer in self.inner_optimizers:
            set_learning_rate(optimizer, self.param_groups[0]["lr"])
            optimizer.step()
        # The state is shown by parameter; the tensors are those of the inner optimizers.
        for number, (parameter, _, view) in enumerate(self._pieces):
            view.grad = None
            for name, value in self._muon.state.get(view, {}).items():
                self.state[parameter][f"{name}_{number}"] = value
        if self._adamw is not None:
            self.state.update(self._adamw.state)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of all groups, times their factors."""
    for group in optimizer.param_groups:
        own = rate * group.get("lr_factor", 1.0)
        if isinstance(group["lr"], Tensor):  # torchao's optimizers compile their step
            group["lr"].fill_(own)
        else:
            group["lr"] = own


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Give a fresh optimizer the state that it has before its first step.

    The optimizer takes a step with gradients of zero and a rate of zero, which changes no weight.
    It then has allocated its tensors by itself: a kernel may round differently on memory with
    another alignment.
    """
    rate = float(optimizer.param_groups[0]["lr"])
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    set_learning_rate(optimizer, 0.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    set_learning_rate(optimizer, rate)
    for parameter in parameters:
        if "step" in optimizer.state[parameter]:
            optimizer.state[parameter]["step"].zero_()


def state_of(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that an optimizer keeps for a parameter, by name.

    One in 8 bits is made of several.
    """
    for name, value in optimizer.state.get(parameter, {}).items():
        if hasattr(value, "__tensor_flatten__") and not is_sharded(value):
            for part in value.__tensor_flatten__()[0]:
                yield f"{name}_{part}", getattr(value, part)
        else:
            yield name, value.detach()
