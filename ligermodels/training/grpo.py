"""GRPO with the model's own `generate_many` as the sampler: sample, reward, and one step.

Each process samples and trains in turns, with one set of weights. Where the model is sharded, each
samples with a whole copy, which gets the weights before it samples. The sampler's log-probabilities
are compared with those that the loss is computed from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import chain
from runpy import run_path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ligermodels.adapters.adapted_model import quantize
from ligermodels.adapters.reference import WithoutAdapters
from ligermodels.errors import ConfigError, LigerError, first_line, short_repr
from ligermodels.generation.generation_config import resolve_rule
from ligermodels.kernels.loss_options import CrossEntropyOutput
from ligermodels.layers.fusion import is_sharded, local_tensor
from ligermodels.losses import (
    LossOutput,
    Mean,
    group_advantages,
    grpo_loss,
    grpo_normalizer,
    token_metrics,
)
from ligermodels.losses.terms import mean_of
from ligermodels.models.base import DecoderModel
from ligermodels.models.layout import reshard, whole_tensor
from ligermodels.parallel.shard import shard
from ligermodels.ranks import error_on_all_ranks, rank
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.training.data import Document, Group, read_prompts
from ligermodels.training.losses import GRPO
from ligermodels.training.model import bits_of, frozen_dtype
from ligermodels.training.objectives import Call, Files, Objective, Rows, log_probs_of
from ligermodels.training.packing import GroupBatch, GroupedRows, padded, stack
from ligermodels.training.run_dir import file_hash

Reward = Callable[..., Sequence[float | None]]


class Sample(NamedTuple):
    """A sampled completion.

    `document` holds the prompt, too, `ended` says whether the completion ended itself, and
    `log_probs` (new,) are the sampler's log-probabilities.
    """

    document: Document
    ended: bool
    log_probs: Tensor


class GRPOObjective(Objective):
    """GRPO and its relatives: the advantage of sampled completions over others of their prompt."""

    options: GRPO
    shown = ("eval_reward", "reward")
    higher_is_better = True
    evaluates_loss = False

    reward: Reward
    reward_hash: str | None
    tokenizer: Tokenizer
    columns: dict[str, None]  # the keys of all records, in order, without "prompt"
    model: DecoderModel
    sampler: DecoderModel  # the model, or if that is sharded, a whole copy
    reference_model: nn.Module | None = None

    def open(self, tokenizer: Tokenizer) -> None:
        """Import the reward function."""
        self.tokenizer, self.columns = tokenizer, {}
        self.reward, self.reward_hash = load_reward(str(self.options.reward_function))

    def read(self, files: Files, tokenizer: Tokenizer) -> list[Any]:
        """Return prompts."""
        groups = read_prompts(files, tokenizer, columns=self.config.data.names)
        self.columns |= dict.fromkeys(name for group in groups for name in group.record)
        self.columns.pop("prompt")
        return groups

    def rows(self, sources: Sequence[Sequence[Any]]) -> Rows:
        """Return prompts that leave room for a completion."""
        room = self.config.data.seq_len - self.options.max_completion_length
        return GroupedRows(sources[0], room, needs_targets=False)

    def load(self, model: DecoderModel) -> int:
        """Copy what samples, if the model is sharded, and the reference model, if there is one."""
        self.model = self.sampler = model
        dtype = frozen_dtype(self.config.model.precision or "float32")
        device: Any = model.rotary_emb.inv_freq.device
        is_divided = any(map(is_sharded, model.parameters()))
        adapter, copies = self.config.adapter, list[DecoderModel]()

        def copied(place: Any) -> DecoderModel:
            copy = type(model).from_hf(str(model.source.folder), dtype=dtype, device=place)
            if adapter.load_in is not None:  # as the weights of the model are; it is not divided
                quantize(copy, bits_of(adapter.load_in), device)
            copies.append(copy.requires_grad_(False).eval())
            return copy

        if is_divided:
            self.sampler = copied(device)
        if self.options.beta and adapter.lora_r is not None and not adapter.modules_to_save:
            self.reference_model = WithoutAdapters(model)
        elif self.options.beta:
            self.reference_model = (
                shard(copied("meta"))
                if is_divided
                else copied("cpu" if adapter.load_in else device)
            )
        held = (x for copy in copies for x in chain(copy.parameters(), copy.buffers()))
        return sum(local_tensor(x).nbytes for x in held)

    def hashes(self) -> dict[str, str]:
        """Return the hash of the reward function's file, if it has one."""
        return {} if self.reward_hash is None else {"reward_function": self.reward_hash}

    def largest_batch(self, rows: Sequence[Rows]) -> tuple[int, int]:
        """Return the completions of a forward pass, and their length with the padding."""
        longest = max(each.width for each in rows) + self.options.max_completion_length
        return self.config.schedule.batch_size, padded(longest)

    @property
    def batches_per_step(self) -> int:
        """All prompts of a step are read at once."""
        return 1

    @property
    def batch_size(self) -> int:
        """The prompts of a step; `schedule.batch_size` counts completions."""
        completions = self.config.schedule.batch_size * super().batches_per_step
        return completions // self.options.num_generations

    @property
    def generation_batch_size(self) -> int:
        """The completions that are sampled together."""
        count = self.options.num_generations
        asked = max(self.options.generation_batch_size or 64, count)
        return min(asked, self.batch_size * count)

    def begin(
        self, call: Call, batches: list[GroupBatch], *, shared: bool = False
    ) -> tuple[list[Any], dict[str, Mean]]:
        """Sample completions of the prompts, reward them, and split them into micro-batches."""
        size, count = self.config.schedule.batch_size, self.options.num_generations
        groups = [group for batch in batches for group in batch.groups for _ in range(count)]
        samples = self._sample(groups)
        # The batches that only keep the ranks in step come last, and count for nothing.
        extra = sum(len(batch.groups) for batch in batches if not batch.num_tokens)
        counted = len(groups) - extra * count
        with error_on_all_ranks():
            documents = [sample.document for sample in samples[:counted]]
            rewards = self._rewards(groups[:counted], documents)
        advantages = torch.zeros(len(groups))
        if counted:
            advantages[:counted] = group_advantages(rewards, count)
        metrics = self._metrics(rewards, samples[:counted])
        made = []
        for start in range(0, len(groups), size):
            part = slice(start, start + size)
            rows, mask = stack([sample.document for sample in samples[part]])
            batch = GroupBatch(
                **vars(rows),
                mask=mask,
                groups=tuple(groups[part]),
                sampling_log_probs=torch.zeros(mask.shape).masked_scatter(
                    mask, torch.cat([sample.log_probs for sample in samples[part]])
                ),
                advantages=advantages[part],
            )
            made.append(batch if start < counted else batch.uncounted())
        if self.reference_model is not None:
            call = self._tempered(call)
            made = [
                replace(batch, ref_log_probs=self._reference_log_probs(call, batch))
                for batch in made
            ]
        return made, metrics

    def counts(self, batch: GroupBatch) -> dict[str, int]:
        """Count rows or tokens, as the type of the loss divides by them."""
        return {"normalizer": int(self._count(batch))}

    def _count(self, batch: GroupBatch) -> Tensor:
        options = self.options
        return grpo_normalizer(batch.mask, options.loss_type, options.max_completion_length)

    def loss(  # type: ignore[override]
        self, call: Call, batch: GroupBatch, normalizer: Tensor
    ) -> LossOutput:
        """Return the loss of a micro-batch, and its metrics. The samples are from this policy."""
        assert batch.advantages is not None and batch.sampling_log_probs is not None
        advantages, reference = batch.advantages, batch.ref_log_probs
        sampled = batch.sampling_log_probs
        options = self.options.formula_options(grpo_loss) | {"normalizer": normalizer}

        def of_rows(tokens: CrossEntropyOutput, rows: Tensor) -> LossOutput:
            mask = batch.mask[rows]
            ref = None if reference is None else reference[rows]
            log_probs = log_probs_of(tokens)
            loss, metrics = grpo_loss(
                log_probs, advantages[rows], mask, ref_log_probs=ref, **options
            )
            difference = (log_probs - sampled[rows]).abs()
            metrics["sampling/sampling_logp_difference/mean"] = mean_of(difference, mask)
            return LossOutput(loss, metrics | token_metrics(mask, entropy=tokens.entropy))

        share = self._count(batch) / normalizer
        return self.loss_of_rows(self._tempered(call), batch, of_rows, share, stats=("entropy",))

    def _tempered(self, call: Call) -> Call:
        """Return the call with which the model has the probabilities that were sampled from."""
        heat = self.options.temperature
        return call if heat == 1 else partial(call, temperature=heat)

    @torch.no_grad()
    def _reference_log_probs(self, call: Call, batch: GroupBatch) -> Tensor:
        """Return the reference model's log-probabilities of a batch."""
        assert self.reference_model is not None
        log_probs = log_probs_of(call(batch, model=self.reference_model, reduction="none"))
        reshard(self.reference_model)
        return log_probs

    @torch.no_grad()
    def _sample(self, groups: list[Group]) -> list[Sample]:
        """Return a completion of each group; those of a prompt follow each other."""
        model, count = self.sampler, self.options.num_generations
        if model is not self.model:
            reshard(self.model)
            for name, weight in self.model.named_parameters():
                model.get_parameter(name).copy_(whole_tensor(weight))
        ends = resolve_rule(model).stops
        prompts = [group.documents[0].ids.tolist() for group in groups]
        seed = int(torch.randint(2**48, ())) + rank()
        was_training = model.training
        model.eval()
        found = list(
            model.generate_many(
                prompts[::count],
                max_new_tokens=self.options.max_completion_length,
                max_batch=self.generation_batch_size,
                num_samples=count,
                return_log_probs=True,
                do_sample=True,
                temperature=self.options.temperature,
                repetition_penalty=1.0,
                eos_token_id=ends,
                generator=torch.Generator(model.rotary_emb.inv_freq.device).manual_seed(seed),
            )
        )
        model.train(was_training)
        samples = []
        for prompt, (tokens, log_probs) in zip(prompts, found):
            ids = np.array(prompt + tokens.tolist(), dtype=np.int32)
            mask = np.arange(len(ids)) >= len(prompt)
            document = Document(ids, mask, divisible=False)
            samples.append(Sample(document, int(ids[-1]) in ends, log_probs))
        return samples

    def _rewards(self, groups: list[Group], documents: list[Document]) -> Tensor:
        """Return the reward of each completion: (completions) float64, NaN for None."""
        if not groups:  # This rank has no prompts. It only takes part in the sampling.
            return torch.zeros(0, dtype=torch.float64)
        records = [group.record for group in groups]
        prompts = [record["prompt"] for record in records]
        ids = [document.ids[document.loss_mask].tolist() for document in documents]
        texts: list[Any] = [self.tokenizer.decode(each) for each in ids]
        for i, prompt in enumerate(prompts):
            if isinstance(prompt, list):
                texts[i] = [{"role": "assistant", "content": texts[i]}]
        columns = {name: [record.get(name) for record in records] for name in self.columns}
        where = f"reward function {self.options.reward_function}"
        try:
            made = self.reward(prompts=prompts, completions=texts, completion_ids=ids, **columns)
            rewards = [float("nan") if each is None else float(each) for each in made]
        except (Exception, SystemExit) as error:  # the function is the user's own
            raise LigerError(f"{where}: {type(error).__name__}: {first_line(error)}") from error
        if len(rewards) != len(groups):
            raise LigerError(f"{where}: it returned {len(rewards)} rewards for {len(groups)} texts")
        for group, each, reward in zip(groups, made, rewards):
            if each is not None and not math.isfinite(reward):
                raise LigerError(
                    f"{where}: the reward of a completion of {short_repr(group.record['prompt'])} "
                    f"is {reward}; return a finite number, or None for none"
                )
        return torch.tensor(rewards, dtype=torch.float64)

    def _metrics(self, rewards: Tensor, samples: list[Sample]) -> dict[str, Mean]:
        scored = ~rewards.isnan()
        groups = rewards.view(-1, self.options.num_generations)
        deviations = groups.std(1) if len(groups) else torch.zeros(0)  # std of nothing warns
        lengths = torch.tensor([float(sample.document.num_targets) for sample in samples])
        cut_off = torch.tensor([float(not sample.ended) for sample in samples])
        return {
            "reward": mean_of(rewards, scored),
            "reward_std": mean_of(deviations, ~deviations.isnan()),
            "frac_reward_zero_std": mean_of((deviations < 1e-8).float()),
            "completions/mean_length": mean_of(lengths),
            "completions/clipped_ratio": mean_of(cut_off),
        }


def load_reward(name: str) -> tuple[Reward, str | None]:
    """Return the function that FILE.py:NAME or MODULE:NAME names, and the SHA-256 of its file.

    What the file imports is not part of the hash; a module without a file has none.

    Raises:
        ConfigError: there is no such function, or its file cannot be imported.
    """
    where, _, function = name.rpartition(":")
    if not where or not function.isidentifier():
        raise ConfigError(f"reward_function: {short_repr(name)} is not FILE.py:NAME or MODULE:NAME")
    try:
        found = run_path(where) if where.endswith(".py") else vars(import_module(where))
    except (Exception, SystemExit) as error:  # the file is the user's own
        raise ConfigError(
            f"reward_function: {where} cannot be imported: {type(error).__name__}: "
            f"{first_line(error)}"
        ) from error
    if not callable(found.get(function)):
        raise ConfigError(f"reward_function: {where} has no function {function!r}")
    path = found.get("__file__")
    return found[function], None if path is None else file_hash(path)
