"""The decoder that all families share: it builds the modules from a config and runs them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from typing_extensions import Self, Unpack

from ligermodels.converters.weight_map import Towers, WeightMap
from ligermodels.errors import ConfigError, did_you_mean
from ligermodels.kernels.dispatch import autocast_dtype
from ligermodels.layers import (
    AttentionContext,
    CrossAttention,
    DecoderBlock,
    GatedMLP,
    HeadOutput,
    LayerNorm,
    LossHead,
    RMSNorm,
    RotaryEmbedding,
    ScaledEmbedding,
)
from ligermodels.layers.attention import Attention
from ligermodels.layers.attention_backend import prepare
from ligermodels.layers.attention_mask import AttentionMask
from ligermodels.layers.experts import (
    Experts,
    Routes,
    Routing,
    load_balancing_loss,
    router_z_loss,
    routing_of,
)
from ligermodels.layers.experts import expert_counts as count_experts
from ligermodels.layers.kv_cache import CachedLayer, DecodeStep, KVCache
from ligermodels.layers.loss_head import HeadOptions
from ligermodels.layers.recompute import run_layer
from ligermodels.layers.sequence_shard import SequenceShard
from ligermodels.models.config import ModelConfig
from ligermodels.models.hf_model import HFModel, WithoutInitialValues
from ligermodels.models.inputs import (
    FLATTENED,
    check_embeds,
    check_ids,
    check_labels,
    check_memory,
    check_tensors,
    flattened_documents,
    hiding,
    next_token_targets,
    rows_mask,
)
from ligermodels.models.kernel_report import kernels_of
from ligermodels.models.module_map import FUSED, ONE_BY_ONE, map_of
from ligermodels.models.planned import PlannedModel

if TYPE_CHECKING:
    from ligermodels.generation.generate import GenerateOptions
    from ligermodels.generation.many import ManyOptions
    from ligermodels.generation.prompts import Prompts

# What generation keeps for the next call with a model in evaluation mode.
kept_for_generation: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


class DecoderContext(NamedTuple):
    """Inputs that the layers of one forward share; `DecoderModel.prepare_context` makes them.

    Attributes:
        layers: the `AttentionContext` of each layer. Layers with the same rope have the same one.
        document_ids: (batch or 1, seq), the number of each token's document, or None if rows are
            not packed.
        layer_embeddings: (batch, seq, layers, size), what a family embeds of each token for each
            layer, or None.
    """

    layers: list[AttentionContext]
    document_ids: Tensor | None
    layer_embeddings: Tensor | None = None

    @property
    def mask(self) -> AttentionMask:
        """The mask of the rows, which all layers share."""
        return self.layers[0].mask

    @property
    def cache(self) -> KVCache | None:
        """The cache to which all layers append, or None."""
        return self.layers[0].cache


class DecoderModel(HFModel, PlannedModel):
    """A decoder whose output is hidden states. The base class of every family.

    A family defines `make_block`, and calls `build` to make its modules. An architecture that needs
    other modules sets the attributes declared here itself, and then calls `initialize_weights`.
    """

    # By this name, HF's Trainer knows that labels are shifted in the model, and leaves the first of
    # each row out of num_items_in_batch.
    loss_type = "ForCausalLM"

    # HF's names of the modules and parameters that are called otherwise here: those in a layer
    # without the layer's name, as {"mlp": "block_sparse_moe"}. A packed linear that is named here
    # is one linear in HF, too. None means that the checkpoint has the model's own names.
    hf_names: ClassVar[Mapping[str, str] | None] = None
    # The layouts that experts may have in a checkpoint, the usual one first, and more `hf_names` of
    # each: see `module_map`. Then HF's names of gate, up and down of a single expert.
    expert_layouts: ClassVar[Mapping[str, Mapping[str, str]]] = {ONE_BY_ONE: {}, FUSED: {}}
    expert_projections: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj", "down_proj")
    # The other tensors that a checkpoint may hold, such as a vision tower.
    towers: ClassVar[Towers | None] = None

    # The arguments of the norms that `norm_of` makes, beside their size and eps.
    norm_options: ClassVar[Mapping[str, Any]] = {}

    # The factors of `load_balancing_loss` and of `router_z_loss` in the loss. A family sets them
    # from its config, and a user may set others, such as (0.01, 0.0) for the balance alone.
    router_losses: tuple[float, float] = (0.0, 0.0)

    embed_tokens: nn.Embedding
    rotary_emb: RotaryEmbedding
    layers: nn.ModuleList
    norm: RMSNorm | LayerNorm
    head: LossHead

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self._parts: list[nn.Module] = []  # the children of the layers, and
        self._attentions: list[Attention] = []  # the attentions found in them

    @classmethod
    def weight_map(cls, config: Any) -> WeightMap:
        """Return the map from this config's parameters to the tensors of an HF checkpoint.

        It follows from the modules and from `hf_names`. Without these, the checkpoint is one of an
        architecture of one's own: see `HFModel.weight_map`.
        """
        if cls.hf_names is None:
            return super().weight_map(config)
        with torch.device("meta"), WithoutInitialValues():
            model = cls(config)
        return map_of(
            model,
            cls.hf_names,
            layouts=cls.expert_layouts,
            projections=cls.expert_projections,
            tied=config.tie_word_embeddings,
            towers=cls.towers,
        )

    def make_block(self, layer_index: int) -> nn.Module:
        """Return a new layer for `build`.

        The model calls it as `layer(x, residual, context)`: tensors (batch, seq, hidden), whose sum
        is the layer's input (a residual of None means zero), and an `AttentionContext`. It returns
        a pair (x, residual), whose sum is its output. If it returns a third tensor, or the `Routes`
        of its experts, the model passes it to `auxiliary_loss`.

        Raises:
            ConfigError: the family does not define this.
        """
        raise ConfigError(
            f"{type(self).__name__} does not define make_block(layer_index); define it, so that "
            "it returns a layer, or make the modules without build"
        )

    def norm_of(self, size: int | None = None) -> RMSNorm:
        """Return a norm over `size` features, by default the hidden size, with `norm_options`."""
        size = size or self.config.hidden_size
        return RMSNorm(size, self.config.rms_norm_eps, **self.norm_options)

    def attention_of(
        self, layer_index: int, *, head_norms: bool = False, **options: Any
    ) -> Attention:
        """Return the attention of a layer, with the heads, window and bias that the config says.

        Args:
            head_norms: whether the heads of queries and keys have norms of `norm_of`.
            options: the other arguments of `Attention`.
        """
        config = self.config
        if head_norms:
            options |= {name: self.norm_of(config.head_dim) for name in ("q_norm", "k_norm")}
        options.setdefault("bias", getattr(config, "attention_bias", False))
        heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        options |= {"sliding_window": config.sliding_windows[layer_index]}
        return Attention(config.hidden_size, *heads, layer_index=layer_index, **options)

    def mlp_of(self, inner: int | None = None) -> GatedMLP:
        """Return an MLP with the config's activation and bias.

        Args: inner: the width of gate and up, by default intermediate_size.
        """
        config, bias = self.config, getattr(self.config, "mlp_bias", False)
        inner = inner or config.intermediate_size
        return GatedMLP(config.hidden_size, inner, bias=bias, activation=config.activation)

    def block_of(self, attention: Attention, mlp: Any) -> DecoderBlock:
        """Return a layer with a norm of `norm_of` before each part: see `DecoderBlock`."""
        return DecoderBlock(attention, mlp, self.norm_of(), self.norm_of())

    def build(
        self,
        *,
        norm: RMSNorm | LayerNorm,
        embedding_scale: float | None = None,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
        trains_padding: bool = False,
    ) -> None:
        """Make embedding, rope, blocks, final norm and head from the config; draw random weights.

        The blocks are those of `make_block`.

        Args:
            norm: the final norm.
            embedding_scale: factor on the embeddings. None means 1.
            logit_scale: factor on the logits. It is applied before the cap.
            logit_softcap: the cap; logits become cap * tanh(logits / cap). None means no cap.
            trains_padding: whether the embedding of the padding token gets gradients, as where
                transformers makes the embedding without padding_idx.
        """
        config = self.config
        hidden, vocab = config.hidden_size, config.vocab_size
        padding = None if trains_padding else config.pad_token_id
        if embedding_scale is None:
            self.embed_tokens = nn.Embedding(vocab, hidden, padding_idx=padding)
        else:
            self.embed_tokens = ScaledEmbedding(
                vocab, hidden, padding_idx=padding, scale=embedding_scale
            )
        self.rotary_emb = RotaryEmbedding(
            config.rotary_dim,
            config.rope_theta,
            config.max_position_embeddings,
            config.rope_scaling,
        )
        blocks = [*map(self.make_block, range(config.num_hidden_layers))]
        if None in blocks:  # nn.ModuleList takes it
            raise ConfigError(f"{type(self).__name__}: make_block returned None; return a layer")
        self.layers = nn.ModuleList(blocks)
        self.norm = norm
        tied_to = self.embed_tokens if config.tie_word_embeddings else None
        self.head = LossHead(
            hidden, vocab, tied_to=tied_to, logit_scale=logit_scale, softcap=logit_softcap
        )
        self.initialize_weights()

    def forward(
        self,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        attention_mask: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: KVCache | None = None,
        return_hidden: bool = False,
        routed_experts: Tensor | None = None,
        expert_counts: Tensor | None = None,
        return_routing: bool = False,
        **loss_options: Unpack[HeadOptions],
    ) -> Tensor | tuple[Tensor, Routing] | HeadOutput:
        """Return hidden states after the final norm, or the head's output if labels are given.

        The model never returns logits; call `model.head.logits` for them.

        Args:
            input_ids: (batch, seq) int64, each in the vocabulary. On a CUDA GPU, an id outside it
                ends in a device-side assertion: the next synchronisation raises RuntimeError,
                nothing is returned, and the process cannot use the GPU any more.
            labels: (batch, seq) int64, at the same positions as the inputs: the model shifts them
                by one. Labels of -100 are ignored, and so is the first token of each document.
            inputs_embeds: (batch, seq, hidden), instead of input_ids: what `embed_tokens` returns
                for tokens, and anything else in the place of others, such as parts of images. It
                has the dtype of the weights, or one that autocast casts.
            position_ids: (batch or 1, seq) int64 or int32. A row is divided into documents where
                positions restart, and attention stays inside each document. Positions are numbers
                and may have any value; from 2^24 on, float32 cannot tell all of them apart. The
                default is 0, 1, 2, ...
            cu_seqlens: (documents + 1) int: the start of each document in all rows joined, then the
                number of their tokens. No document goes on in another row. It replaces
                position_ids.
            max_seqlen: length of the longest document in cu_seqlens. If it is given, a GPU may use
                the varlen kernel.
            attention_mask: (batch, seq), bool or integers, 0 for padding on either side. Without
                position_ids, positions also count padding tokens, as in HF. With a cache the mask
                also covers the cached tokens. A mask that is on the CPU, also for a model on a GPU,
                costs nothing if it is all ones. What padding computes is not specified. In 16 bit
                and with the mask on a GPU, padding between tokens makes all hidden states NaN,
                because that is found out without a look at the mask: pass such a mask on the CPU.
            prefix_lengths: (batch or 1,) integers. The first so many tokens of each row, cached
                tokens and padding included, also see the tokens after them up to that length.
            memory: (batch, keys, memory size), for layers with `CrossAttention`: what they attend
                to, such as the output of an encoder.
            memory_mask: (batch or 1, keys), 0 for padding in the memory.
            cache: a `ligermodels.KVCache`, for inference.
            return_hidden: whether an output for labels has the hidden states, too.
            routed_experts: (batch, seq, layers with experts, top_k) integers, the experts that each
                token takes instead of those that its routers would choose, such as the `experts` of
                an earlier `Routing`. The weights of the experts are those of the routers.
            expert_counts: (layers with experts, experts), the sum of the `counts` of the `Routing`
                of all micro-batches of a step. With it, the losses of routers of the micro-batches
                add up to that of one batch. A model that `shard` has spread averages it over ranks.
            return_routing: whether to return the `Routing`, too: beside the hidden states, or in
                the output for labels.
            loss_options: as in `LossHead.forward` (normalizer or its other name num_items_in_batch,
                reduction, label_smoothing, ...). cu_seq_lens_q and max_length_q, the names of
                DataCollatorWithFlattening, are taken as cu_seqlens and max_seqlen; its position_ids
                are not needed then.
        Returns: (batch, seq, hidden), that and a `Routing`, or a `HeadOutput`.
        Raises:
            ValueError: the inputs contradict each other, or the model cannot honour one of them.
            IndexError: on a CPU in eager mode, an id or a label is outside the vocabulary.
        """
        if any(name in loss_options for name in FLATTENED):
            given: dict[str, Any] = {**loss_options, "position_ids": position_ids}
            found = flattened_documents(given)
            position_ids = given.pop("position_ids")
            loss_options = given  # type: ignore[assignment]
            if found:
                cu_seqlens, max_seqlen, position_ids = found.values()
        check_tensors(inputs_embeds=inputs_embeds)
        inputs = self._check_inputs(input_ids, inputs_embeds)
        if labels is None and loss_options:
            hint = did_you_mean(next(iter(loss_options)), signature(self.forward).parameters)
            raise ValueError(
                f"{', '.join(loss_options)}: the model has no such input{hint} "
                "(loss options need labels; pass labels, or leave the options out. HF's Trainer "
                "takes the labels out for label_smoothing_factor, where "
                "model.head.loss_options['label_smoothing'] does the same, and for "
                "compute_loss_func, which needs LigerForCausalLM.from_native(model))"
            )
        if labels is not None:
            check_labels(labels, inputs.shape[:2])
        context = self.prepare_context(
            inputs,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            attention_mask=attention_mask,
            prefix_lengths=prefix_lengths,
            memory=memory,
            memory_mask=memory_mask,
            cache=cache,
        )
        shard = self.row_shard
        inputs = inputs if shard is None else shard.split(inputs)
        if routed_experts is not None:
            context = self._routed(context, routed_experts, len(inputs))
        # No variable here names the embeddings: it would hold them until the end of the head.
        hidden, extras = self.run_layers(
            self.embed_tokens(inputs) if inputs_embeds is None else inputs, context
        )
        routing = None
        if return_routing:
            routing = self._routing(extras, len(inputs), attention_mask)
        if labels is None:
            hidden = hidden if shard is None else shard.whole(hidden)
            return hidden if routing is None else (hidden, routing)
        ignore_index = (self.head.loss_options | loss_options).get("ignore_index", -100)
        targets = next_token_targets(labels, context.document_ids, ignore_index)
        if shard is None:
            output = self.head(hidden, targets, **loss_options)
        else:
            output = shard.loss(self.head, hidden, targets, loss_options)
        if return_hidden:
            output = output.with_values(hidden=hidden if shard is None else shard.whole(hidden))
        if routing is not None:
            output = output.with_values(routing=routing)
        auxiliary = self._auxiliary(extras, attention_mask, expert_counts)
        if auxiliary is None:
            return output
        return self._add_loss(output, auxiliary, loss_options, expert_counts is not None)

    def _routed(self, context: DecoderContext, experts: Tensor, batch: int) -> DecoderContext:
        """Return the context with the experts of each token, (batch, seq, layers, top_k)."""
        found = [
            [x.router.top_k for x in layer.modules() if isinstance(x, Experts)]
            for layer in self.layers
        ]
        seq = context.layers[0].cos.shape[1]
        seq *= 1 if self.row_shard is None else self.row_shard.ranks
        each_top_k = [k for each in found for k in each]
        expected = (batch, seq, len(each_top_k), max([0, *each_top_k]))
        if experts.shape != expected or any(len(each) > 1 for each in found):
            raise ValueError(
                f"routed_experts: {tuple(experts.shape)} for {expected[2]} layers with experts; "
                f"expected {expected}: rows, tokens, layers, top_k"
            )
        if self.row_shard is not None:
            experts = self.row_shard.split(experts)
        each = iter(experts.unbind(2))
        layers = [c.changed(experts=next(each)) if k else c for c, k in zip(context.layers, found)]
        return context._replace(layers=layers)

    def _routing(self, extras: list[Any], batch: int, attention_mask: Tensor | None) -> Routing:
        """Return the `Routing` of the routes that layers returned."""
        routes, shard = [x for x in extras if isinstance(x, Routes)], self.row_shard
        if not routes:
            raise ValueError(f"return_routing: no layer of {type(self).__name__} has experts")
        if shard is None:
            return routing_of(routes, batch, attention_mask)
        mask = None if attention_mask is None else shard.split(attention_mask)
        found = routing_of(routes, batch, mask)
        return found._replace(experts=shard.whole(found.experts))

    def _auxiliary(
        self, extras: list[Any], attention_mask: Tensor | None, counts: Tensor | None = None
    ) -> Tensor | None:
        """Return `auxiliary_loss`, or None. It is the mean of those of the parts of rows."""
        if not extras:
            return None
        shard = self.row_shard
        if shard is not None and attention_mask is not None:
            attention_mask = shard.split(attention_mask)
        loss = self.auxiliary_loss(extras, attention_mask, counts)
        return loss if shard is None or loss is None else shard.total(loss) / shard.ranks

    def auxiliary_loss(
        self, extras: list[Any], attention_mask: Tensor | None, expert_counts: Tensor | None = None
    ) -> Tensor | None:
        """Return a scalar to add to the loss, from the third results of the layers, or None.

        By default, those are `Routes` or scalars. The losses of the routers are added with the
        factors of `router_losses`, and the sum of the scalars. `forward` calls it if labels are
        given. With reduction "mean" the output's loss contains it; with a normalizer and without
        expert_counts, only the fraction num_valid / normalizer of it, so that the micro-batches of
        a step add up to one. With any reduction, and with a loss_function, it is the output's
        `auxiliary_loss`.

        Args: extras: these results, in the order of the layers; attention_mask and expert_counts:
            as in `forward`.
        Raises: ConfigError if `router_losses` is no pair.
        """
        routes = [x for x in extras if isinstance(x, Routes)]
        scalars = [x for x in extras if not isinstance(x, Routes)]
        loss = torch.stack(scalars).sum() if scalars else None
        if not isinstance(self.router_losses, (tuple, list)) or len(self.router_losses) != 2:
            raise ConfigError(
                f"router_losses is {self.router_losses!r}; expected a pair, the factors of the "
                "balance of experts and of the z-loss, such as (0.01, 0.0)"
            )
        balance, z = self.router_losses
        if not routes or not (balance or z):
            return loss
        counts = count_experts(routes, attention_mask) if expert_counts is None else expert_counts
        if self.layout is not None:
            counts = self.layout.mean(counts)
        if balance:
            added = balance * load_balancing_loss(routes, attention_mask, counts)
            loss = added if loss is None else loss + added
        if z:
            added = z * router_z_loss(routes, attention_mask, counts)
            loss = added if loss is None else loss + added
        return loss

    def _add_loss(
        self,
        output: HeadOutput,
        auxiliary: Tensor,
        loss_options: HeadOptions,
        adds_up: bool = False,
    ) -> HeadOutput:
        """Return the output with what layers add to the loss.

        Args: adds_up: whether that is a part of the step's, and not the mean of the micro-batch.
        """
        options: dict[str, Any] = {**self.head.loss_options, **loss_options}
        output = output.with_values(auxiliary_loss=auxiliary)
        if options.get("reduction", "mean") != "mean" or options.get("loss_function") is not None:
            return output
        names = ("normalizer", "num_items_in_batch")
        normalizers = [options[name] for name in names if options.get(name) is not None]
        if not normalizers or adds_up:
            return output.with_values(loss=output.loss + auxiliary)
        valid = output.num_valid
        if self.layout is not None and any(self.router_losses):
            valid = self.layout.mean(valid)  # the routers' losses are those of all ranks
        return output.with_values(loss=output.loss + valid / normalizers[0] * auxiliary)

    def loss(self, input_ids: Tensor, labels: Tensor, **options: Unpack[HeadOptions]) -> Tensor:
        """Return `model(input_ids, labels=labels, **options).loss`.

        If the model is wrapped (DDP, FSDP2, torch.compile), call the wrapper instead.
        """
        return self(input_ids, labels=labels, **options).loss

    @torch.no_grad()
    def resize_token_embeddings(self, size: int) -> None:
        """Give embedding and head `size` rows; new ones are the mean of the old ones.

        The parameters are new, so make an optimizer after it.
        """
        modules: list[Any] = [self.embed_tokens]
        if isinstance(self.head, LossHead) and not self.head.is_tied:
            modules.append(self.head.proj)
        for module in modules:
            for name, old in [*module.named_parameters()]:
                mean = old.float().mean(0, keepdim=True).to(old.dtype)
                more = mean.expand(max(0, size - len(old)), *old.shape[1:])
                setattr(module, name, nn.Parameter(torch.cat([old[:size], more])))
        self.embed_tokens.num_embeddings = size
        if isinstance(self.head, LossHead):
            self.head.vocab_size = size
            if not self.head.is_tied:
                self.head.proj.out_features = size
        self.config.vocab_size = self.built_from.vocab_size = size

    @property
    def row_shard(self) -> SequenceShard | None:
        """The part of each row that this rank computes under context parallelism, or None."""
        return None if self.layout is None else self.layout.rows

    def _check_inputs(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """Check that exactly one of input_ids and inputs_embeds is given and valid; return it."""
        if (input_ids is None) == (inputs_embeds is None):
            given = "both are given" if input_ids is not None else "neither is given"
            raise ValueError(f"input_ids and inputs_embeds: {given}; pass one of them")
        if input_ids is not None:
            vocab = getattr(self.embed_tokens, "num_embeddings", self.config.vocab_size)
            return check_ids(input_ids, vocab)
        assert inputs_embeds is not None
        check_embeds(inputs_embeds, self.embed_tokens, self.parameters())
        return inputs_embeds

    def run_layers(self, x: Tensor, context: DecoderContext) -> tuple[Tensor, list[Any]]:
        """Return the hidden states after the final norm, and the third results of the layers.

        `forward` is `prepare_context`, `embed_tokens`, this, and the head. If the context has a
        cache, it advances by these tokens.

        Args:
            x: (batch, seq, hidden), such as `embed_tokens` returns. Under context parallelism, they
                are those of this rank's part of each row.
            context: what `prepare_context` returned for them.
        """
        residual = None
        extras: list[Any] = []
        extra: list[Any]
        store = self._offloader(x.device, context.layers)
        cache, seq = context.cache, x.shape[1]
        runs: Counter[nn.Module] = Counter()
        repeats = getattr(cache, "uses", 1) > 1  # another class with a cache's methods may lack it
        layers = zip(self.layers, context.layers, self._layer_plans(), strict=True)
        for index, (layer, inputs, plan) in enumerate(layers):
            if cache is not None and repeats:
                cache.use = runs[layer]
                runs[layer] += 1
            with nullcontext() if store is None else store.layer(index, plan.host):
                kept_in = store if plan.host else None
                x, residual, *extra = run_layer(
                    layer, x, residual, inputs, plan.policy, plan.tile, plan.float8, kept_in
                )
                extras += extra
        hidden = self.norm(x) if residual is None else self.norm(x, residual)[0]
        if context.mask.fault is not None:
            hidden = hidden + context.mask.fault.to(hidden)
        if cache is not None:
            cache.advance(seq)
        return hidden, extras

    @property
    def is_recurrent(self) -> bool:
        """Whether layers keep a state of a fixed size in a cache, as `LinearAttention` does."""
        return any(isinstance(x, CachedLayer) and x.recurrent for x in self.layers.modules())

    @property
    def ropes(self) -> list[str]:
        """For each layer, the name of the attribute that holds its rotary embedding."""
        return ["rotary_emb"] * len(self.layers)

    def prepare_context(
        self,
        inputs: Tensor,
        *,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        attention_mask: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> DecoderContext:
        """Return what the layers of one forward share, for `run_layers` or for a layer alone.

        Args:
            inputs: ids (batch, seq) or embeddings (batch, seq, hidden), of which only the shape and
                the device count.
            position_ids, cu_seqlens, max_seqlen, attention_mask: as in `forward`.
            prefix_lengths, memory, memory_mask, cache: as in `forward`.
        Raises:
            ValueError: the arguments contradict each other, or one has a wrong shape or dtype.
        """
        check_tensors(
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            attention_mask=attention_mask,
            prefix_lengths=prefix_lengths,
            memory=memory,
            memory_mask=memory_mask,
        )
        batch, seq = inputs.shape[:2]
        past = 0 if cache is None else cache.length
        shard = self.row_shard
        # Another class with a cache's methods may have no steps.
        step: DecodeStep | None = getattr(cache, "step", None)
        if cache is not None and step is not None:
            return self._step_context(seq, cache, step)
        mask, position_ids, document_ids = rows_mask(
            inputs,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            attention_mask=attention_mask,
            prefix_lengths=prefix_lengths,
            cache=cache,
            shard=shard,
        )
        if cache is None:
            self._prepare(mask, batch, inputs.device)
        keys = self._memory_keys(memory, memory_mask, inputs)
        length: int | None = None
        if position_ids is None:
            position_ids = torch.arange(past, past + seq, device=inputs.device).unsqueeze(0)
            length = past + seq
        more: Any = {"shared": {}, "memory": memory, "memory_mask": keys}
        return DecoderContext(
            self._contexts(position_ids, length, mask, cache, **more), document_ids
        )

    def _contexts(
        self,
        positions: Tensor,
        length: int | Tensor | None,
        mask: AttentionMask,
        cache: KVCache | None,
        **more: Any,
    ) -> list[AttentionContext]:
        """Return the context of each layer; layers with one rope share it."""
        contexts, shard = {}, self.row_shard
        for name in sorted(set(self.ropes)):
            rope = getattr(self, name)
            cos, sin = rope(positions, length)
            factors = rope.query_factors(positions)
            if shard is not None:
                cos, sin = shard.split(cos), shard.split(sin)
                factors = None if factors is None else shard.split(factors)
            contexts[name] = AttentionContext(cos, sin, mask, cache, query_factors=factors, **more)
        return [contexts[name] for name in self.ropes]

    def _step_context(self, seq: int, cache: KVCache, step: DecodeStep) -> DecoderContext:
        """Return the context of a step of decoding with `seq` new tokens of each row."""
        ends = step.ends if step.firsts is None else step.ends - step.firsts
        positions = ends[:, None] + torch.arange(-seq, 0, device=ends.device)
        # Angles that depend on the length are those of a step for each token. As in a forward,
        # padded rows all have those of the longest one.
        lengths = positions + 1
        length = (lengths if step.firsts is None else lengths.amax(0)).unsqueeze(-1)
        return DecoderContext(self._contexts(positions, length, AttentionMask(seq), cache), None)

    def _memory_keys(
        self, memory: Tensor | None, memory_mask: Tensor | None, inputs: Tensor
    ) -> AttentionMask | None:
        """Check the memory, and return the mask of its keys; None without a memory."""
        if memory is None:
            if memory_mask is not None:
                raise ValueError("memory_mask: it needs a memory, which is missing")
            return None
        batch, seq = inputs.shape[:2]
        layers = [x for x in self.layers.modules() if isinstance(x, CrossAttention)]
        if not layers:
            raise ValueError(
                f"memory: no layer of {type(self).__name__} attends to one; leave it out, or use "
                "layers with CrossAttention"
            )
        check_memory(memory, memory_mask, batch, self.embed_tokens, self.parameters())
        padding = hiding(memory_mask, inputs.device)
        ranks = 1 if self.row_shard is None else self.row_shard.ranks
        mask = AttentionMask(seq // ranks, memory.shape[1], padding_mask=padding)
        dtype = self._compute_dtype
        for each in layers:
            heads, head_dim = each.num_heads, each.head_dim
            prepare(mask, None, each.softcap, batch, heads, inputs.device, dtype, head_dim, False)
        return mask

    def _prepare(self, mask: AttentionMask, batch: int, device: torch.device) -> None:
        """Compute the forms of the mask that the layers will need, once for each kind of layer."""
        dtype = self._compute_dtype
        kinds = {
            (x.sliding_window, x.softcap, x.num_heads, x.head_dim, x.causal, x.sinks is not None)
            for x in self._find_attentions()
        }
        for window, softcap, heads, head_dim, causal, sinks in kinds:
            options = device, dtype, head_dim, causal, sinks
            prepare(mask, window, softcap, batch, heads, *options)

    @property
    def _compute_dtype(self) -> torch.dtype:
        weight = self.embed_tokens.weight
        return autocast_dtype(weight) or weight.dtype

    def _find_attentions(self) -> list[Attention]:
        """Return the attentions in the layers.

        A walk through all modules takes longer than the launch of a layer's kernels, so they are
        looked up again only if a layer, or a child of one, was replaced.
        """
        parts = [part for layer in self.layers for part in layer.children()]
        if torch.compiler.is_compiling() or parts != self._parts:
            found = [x for x in self.layers.modules() if isinstance(x, Attention)]
            if torch.compiler.is_compiling():
                return found
            self._parts, self._attentions = parts, found
        return self._attentions

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Initialise all weights again.

        Linear and embedding weights are normal with standard deviation config.initializer_range.
        Biases and the padding token's embedding are 0; the factors of norms are 1. Another module
        that has parameters of its own initialises them in its `reset_parameters`. If it has no such
        method, those with two or more dimensions are normal, and the others stay as they are.
        """
        if all(weight.is_meta for weight in self.parameters()):
            return  # there are no values
        std = self.config.initializer_range
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
                if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                    module.weight[module.padding_idx].zero_()
            elif own := [*module.parameters(recurse=False)]:
                if callable(reset := getattr(module, "reset_parameters", None)):
                    reset()
                else:
                    for weight in own:
                        if weight.dim() > 1:
                            nn.init.normal_(weight, std=std)

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode. Training frees what generation keeps for its next call.

        That is the cache and the CUDA graph of the last `generate`.
        """
        if mode:
            kept_for_generation.pop(self, None)
        return super().train(mode)

    def generate(
        self, input_ids: "Prompts | None" = None, **options: "Unpack[GenerateOptions]"
    ) -> Any:
        """Continue prompts, greedily by default; see `ligermodels.generation.generate`."""
        from ligermodels.generation.generate import generate

        return generate(self, input_ids, **options)

    def generate_many(
        self,
        prompts: Iterable[Tensor | Sequence[int]],
        max_new_tokens: int | Sequence[int] = 64,
        **options: "Unpack[ManyOptions]",
    ) -> Iterator[Any]:
        """Continue many prompts in a full batch; see `ligermodels.generation.generate_many`."""
        from ligermodels.generation.many import generate_many

        return generate_many(self, prompts, max_new_tokens, **options)

    def kernels(self) -> dict[str, str]:
        """Return which implementation each op uses on this model in its present state, and why.

        Returns: a dict {op: "implementation (reason)"}. It also lists replaced projections by name.
        """
        return kernels_of(self, self.embed_tokens.weight, self.head)
