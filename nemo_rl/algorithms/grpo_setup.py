"""Builds cluster, policy, generation, data and logger from a valid configuration, runs the loop, reports, tears down."""

from __future__ import annotations

import importlib.metadata
import logging
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.algorithms.grpo import GRPOComponents, GRPOState, grpo_train
from nemo_rl.algorithms.loss import ClippedPGLossFn
from nemo_rl.data.datasets import PromptLoader, build_datasets
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.distributed.device import resolve_device
from nemo_rl.distributed.ray_runtime import init_ray, shutdown_ray
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.environments.registry import create_environment
from nemo_rl.errors import ConfigError
from nemo_rl.experience.rollouts import pack_prompts, sample_seed
from nemo_rl.models.generation.vllm.speculative import merge_speculative_config
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.progress import RunProgress
from nemo_rl.utils.report import write_report
from nemo_rl.utils.timer import Timer
from nemo_rl.weight_sync.synchronizer import WeightSynchronizer

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import MasterConfig
    from nemo_rl.utils.preflight import PreflightResult

log = logging.getLogger(__name__)

VERSIONED_PACKAGES = ("torch", "vllm", "nemo-automodel", "transformers", "ray", "numpy")
