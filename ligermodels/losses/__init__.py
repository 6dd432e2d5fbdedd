"""Losses as plain functions of per-token statistics of the loss head, with the papers' formulas."""

from ligermodels.losses.contrastive import info_nce as info_nce
from ligermodels.losses.kto import kto_kl as kto_kl
from ligermodels.losses.kto import kto_loss as kto_loss
from ligermodels.losses.policy import group_advantages as group_advantages
from ligermodels.losses.policy import grpo_loss as grpo_loss
from ligermodels.losses.policy import grpo_normalizer as grpo_normalizer
from ligermodels.losses.policy import importance_ratio as importance_ratio
from ligermodels.losses.policy import rloo_advantages as rloo_advantages
from ligermodels.losses.policy import rloo_loss as rloo_loss
from ligermodels.losses.preference import cpo_loss as cpo_loss
from ligermodels.losses.preference import dpo_loss as dpo_loss
from ligermodels.losses.preference import orpo_loss as orpo_loss
from ligermodels.losses.reward import bradley_terry_loss as bradley_terry_loss
from ligermodels.losses.reward import token_reward_loss as token_reward_loss
from ligermodels.losses.terms import LossOutput as LossOutput
from ligermodels.losses.terms import Mean as Mean
from ligermodels.losses.terms import sft_loss as sft_loss
from ligermodels.losses.terms import token_metrics as token_metrics
