"""Multi-token prediction: blocks that predict one more token each, and draft tokens in generation.

    python -m examples.multi_token --output-dir runs/multi_token

They are those of DeepSeek-V3 (arXiv:2412.19437, 2.2), here on a small decoder of bytes. Module k
takes the hidden state of the module before it, or of the body, and the embedding of the token k
places later, which it has already been told. Embedding and head are the body's. The run prints how
many tokens a forward pass gives, and checks that they are the tokens of greedy generation.
"""

import copy
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.command import TRAIN, call, learn, report, windows
from ligermodels import LigerLlama, LlamaConfig
from ligermodels.heads.medusa import (
    DraftOutput,
    draft_targets,
    loss_divisors,
    shared_head_loss,
)
from ligermodels.layers import AttentionContext
from ligermodels.layers.kv_cache import KVCache
from ligermodels.models.base import DecoderModel
from ligermodels.models.inputs import next_token_targets


class MultiTokenModule(nn.Module):
    """One module: norms, a projection of both inputs to one, a block and a norm.

    Args: model: the body. Block and norms start as copies of its last block and its final norm.
    """

    def __init__(self, model: DecoderModel) -> None:
        super().__init__()
        hidden_size = model.embed_tokens.embedding_dim
        self.hidden_norm, self.embedding_norm = (copy.deepcopy(model.norm) for _ in range(2))
        self.proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        nn.init.normal_(self.proj.weight, std=model.config.initializer_range)
        self.proj.to(model.embed_tokens.weight.device, model.embed_tokens.weight.dtype)
        self.block = copy.deepcopy(model.layers[-1])
        self.norm = copy.deepcopy(model.norm)

    def forward(self, hidden: Tensor, embeds: Tensor, context: AttentionContext) -> Tensor:
        """Return the next hidden states (batch, seq, hidden), from those and later embeddings."""
        both = torch.cat((self.hidden_norm(hidden), self.embedding_norm(embeds)), -1)
        x, residual, *_ = self.block(self.proj(both), None, context)
        return self.norm(x) if residual is None else self.norm(x, residual)[0]


class MultiTokenModel(nn.Module):
    """A body with multi-token prediction modules, trained together.

    Args:
        model: the body.
        num_modules: how many tokens after the next one are predicted.
        weight: the loss is the body's and `weight` times the mean of the modules' (0.3 and later
            0.1 in the paper).
    """

    def __init__(self, model: DecoderModel, num_modules: int = 1, *, weight: float = 0.3) -> None:
        super().__init__()
        self.model, self.weight = model, weight
        self.mtp = nn.ModuleList(MultiTokenModule(model) for _ in range(num_modules))

    def forward(
        self, input_ids: Tensor, labels: Tensor, normalizer: float | Tensor | None = None
    ) -> DraftOutput:
        """Return the loss for (batch, seq) ids and labels; `losses` are the body's, the modules'.

        All losses go through one chunk loop of the head, with one sum of its weight gradient. What
        the body's layers add to a loss is part of it.
        normalizer divides the sum over tokens of each. By default it is the number of its targets.
        """
        model = self.model
        context, embeds = model.prepare_context(input_ids), model.embed_tokens(input_ids)
        ignore_index = model.head.loss_options.get("ignore_index", -100)
        hidden, extras = model.run_layers(embeds, context)
        states, targets = [hidden], [next_token_targets(labels, None, ignore_index)]
        later = embeds
        for k, module in enumerate(self.mtp, 1):
            # The last k positions have no later token, and no target either.
            later = F.pad(later[:, 1:], (0, 0, 0, 1))
            states.append(module(states[-1], later, context.layers[-1]))
            targets.append(draft_targets(labels, k, None, ignore_index))
        valid = torch.stack([(x != ignore_index).sum() for x in targets])
        share = self.weight / max(len(self.mtp), 1)
        shares = torch.tensor([1.0, *[share] * len(self.mtp)]).to(embeds.device, non_blocking=True)
        divisors = loss_divisors(valid, normalizer)
        loss, parts = shared_head_loss(model.head, torch.stack(states), targets, shares / divisors)
        if (auxiliary := model._auxiliary(extras, None)) is not None:
            loss = loss + valid[0] / divisors[0] * auxiliary
        return DraftOutput(loss, parts / shares, valid)

    @property
    def num_drafts(self) -> int:
        """The number of tokens after the next one that are predicted."""
        return len(self.mtp)

    def check_model(self, model: DecoderModel) -> None:
        """Raise ValueError unless the modules belong to this model."""
        if self.model is not model:
            raise ValueError("generate with heads: the modules belong to another model")

    def drafter(self, max_length: int, sampler: object) -> "_Drafter":
        """Return a function that drafts tokens in generation, as `MedusaHeads.drafter` does."""
        return _Drafter(self, max_length)


class _Drafter:
    """The modules with a cache each.

    Module k reads at position i a hidden state of the module before it and the token i + k. At the
    last k - 1 positions those are drafts. So each call reads the positions that are new or had a
    wrong draft, and in order that it is always the same work, the same number of last positions:
    with K modules K + 1, for up to K right drafts and the token after them.
    """

    def __init__(self, model: MultiTokenModel, max_length: int) -> None:
        self.model, self.body = model, model.model
        count = len(model.mtp)
        self.width = count + 1
        self.caches = [KVCache.of(module, 1, max_length, extra=count) for module in model.mtp]
        # The body's states of the last positions, and the token after each of them.
        self.states: Tensor | None = None
        self.after: Tensor

    def __call__(
        self, hidden: Tensor, tokens: Tensor, right: Tensor, ends: Tensor
    ) -> tuple[Tensor, None]:
        states, after, is_prompt = hidden, tokens[:, 1:], self.states is None
        if self.states is None:
            self.states, self.after = (x[:, -self.width :].clone() for x in (states, after))
        else:
            last = right + torch.arange(self.width, device=right.device)
            states = self.states.copy_(torch.cat((self.states, states), 1).index_select(1, last))
            after = self.after.copy_(torch.cat((self.after, after), 1).index_select(1, last))
        count = states.shape[1]
        for module, cache in zip(self.model.mtp, self.caches):
            embeds = self.body.embed_tokens(after[:, -count:])
            with nullcontext() if is_prompt else cache.step_at(ends):
                context = self.body.prepare_context(states, cache=cache)
                states = module(states, embeds, context.layers[-1])
            cache.advance(count if is_prompt else 0)
            guess = self.body.head.logits(states[:, -1:]).argmax(-1)
            after = torch.cat((after, guess), 1)
        return after[:, -len(self.caches) :], None


def main(output_dir: Path, *, max_steps: int = 200, new: int = 96) -> dict[str, float]:
    """Train a decoder with two modules, and count the tokens of each pass of a generation."""
    torch.manual_seed(0)
    data = torch.tensor(list(TRAIN.read_bytes()))
    sizes = {"hidden_size": 96, "intermediate_size": 288, "num_hidden_layers": 3}
    body = LigerLlama(LlamaConfig(vocab_size=256, num_attention_heads=6, **sizes))
    model = MultiTokenModel(body, 2)

    def loss_of(generator: torch.Generator) -> Tensor:
        ids = windows(data, 8, 128, generator)
        return model(ids, labels=ids).loss

    history = learn(model, loss_of, max_steps, every=25)
    passes: list[Tensor] = []
    options = {"max_new_tokens": new, "eos_token_id": []}
    made = body.generate(data[:64], heads=model, callback=passes.append, **options)
    same = torch.equal(made, body.generate(data[:64], **options))
    print(f"they are the tokens of greedy generation: {same}")
    return report(output_dir, loss=history[-1], tokens_per_forward=new / len(passes))


if __name__ == "__main__":
    call(main, __doc__, model=False)
