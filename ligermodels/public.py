"""The list of public names. The package `ligermodels` re-exports each of them.

It has four more, which need an optional library or the whole of training, in a table of its own.

Each import has the form `X as X`, which tells type checkers that the name is exported from here.
"""

from ligermodels.adapters.reference import adapters_off as adapters_off
from ligermodels.adapters.reference import frozen_copy as frozen_copy
from ligermodels.adapters.reference import token_log_probs as token_log_probs
from ligermodels.converters.load_pretrained import LoadReport as LoadReport
from ligermodels.converters.weight_map import Entry as Entry
from ligermodels.converters.weight_map import Span as Span
from ligermodels.converters.weight_map import Towers as Towers
from ligermodels.converters.weight_map import WeightMap as WeightMap
from ligermodels.converters.weight_map import expert_entry as expert_entry
from ligermodels.converters.weight_map import linear_entries as linear_entries
from ligermodels.converters.weight_map import norm_entries as norm_entries
from ligermodels.converters.weight_map import packed_entry as packed_entry
from ligermodels.errors import CheckpointError as CheckpointError
from ligermodels.errors import ConfigError as ConfigError
from ligermodels.errors import DataError as DataError
from ligermodels.errors import LigerError as LigerError
from ligermodels.errors import SaveError as SaveError
from ligermodels.heads.classifier import LigerClassifier as LigerClassifier
from ligermodels.heads.classifier import classifier_class as classifier_class
from ligermodels.heads.embedding import EmbeddingModel as EmbeddingModel
from ligermodels.kernels.adamw import AdamW as AdamW
from ligermodels.layers.kv_cache import KVCache as KVCache
from ligermodels.memory.plan import LayerPlan as LayerPlan
from ligermodels.memory.plan import MemoryPlan as MemoryPlan
from ligermodels.models.auto import AutoLiger as AutoLiger
from ligermodels.models.auto import families as families
from ligermodels.models.auto import load_pretrained as load_pretrained
from ligermodels.models.auto import register as register
from ligermodels.models.base import DecoderModel as DecoderModel
from ligermodels.models.config import ModelConfig as ModelConfig
from ligermodels.models.decoder_weight_map import attention_entries as attention_entries
from ligermodels.models.decoder_weight_map import decoder_weight_map as decoder_weight_map
from ligermodels.models.decoder_weight_map import experts_entries as experts_entries
from ligermodels.models.decoder_weight_map import mlp_entries as mlp_entries
from ligermodels.models.gemma import GemmaConfig as GemmaConfig
from ligermodels.models.gemma import LigerGemma as LigerGemma
from ligermodels.models.gemma2 import Gemma2Config as Gemma2Config
from ligermodels.models.gemma2 import LigerGemma2 as LigerGemma2
from ligermodels.models.gemma3 import Gemma3Config as Gemma3Config
from ligermodels.models.gemma3 import LigerGemma3 as LigerGemma3
from ligermodels.models.gemma4 import Gemma4Config as Gemma4Config
from ligermodels.models.gemma4 import LigerGemma4 as LigerGemma4
from ligermodels.models.gpt_oss import GptOssConfig as GptOssConfig
from ligermodels.models.gpt_oss import LigerGptOss as LigerGptOss
from ligermodels.models.llama import LigerLlama as LigerLlama
from ligermodels.models.llama import LlamaConfig as LlamaConfig
from ligermodels.models.mistral import LigerMistral as LigerMistral
from ligermodels.models.mistral import MistralConfig as MistralConfig
from ligermodels.models.mixtral import LigerMixtral as LigerMixtral
from ligermodels.models.mixtral import MixtralConfig as MixtralConfig
from ligermodels.models.qwen2 import LigerQwen2 as LigerQwen2
from ligermodels.models.qwen2 import Qwen2Config as Qwen2Config
from ligermodels.models.qwen3 import LigerQwen3 as LigerQwen3
from ligermodels.models.qwen3 import Qwen3Config as Qwen3Config
from ligermodels.models.qwen3_moe import LigerQwen3Moe as LigerQwen3Moe
from ligermodels.models.qwen3_moe import Qwen3MoeConfig as Qwen3MoeConfig
from ligermodels.parallel.shard import clip_grad_norm_ as clip_grad_norm_
from ligermodels.parallel.shard import mean_over_ranks as mean_over_ranks
from ligermodels.parallel.shard import no_sync as no_sync
from ligermodels.parallel.shard import shard as shard
from ligermodels.text.tokenizer import Tokenizer as Tokenizer
from ligermodels.training.checkpoints import sharded_state as sharded_state
