"""DSpark: blocks whose tokens depend on the one before, with a head that predicts their acceptance."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from nemo_rl.models.automodel.draft.acceptance import ElementTable, Metrics, depth_pairs, prefix_pairs
from nemo_rl.models.automodel.draft.adapters.base import DraftAdapter
from nemo_rl.models.automodel.draft.adapters.dspark import DSparkAdapter
from nemo_rl.models.automodel.draft.block import BlockRuntime
from nemo_rl.models.automodel.draft.block_losses import BlockLossOutput
from nemo_rl.models.automodel.draft.config import DSparkDraftConfig
from nemo_rl.models.automodel.draft.losses import STATS
from nemo_rl.models.automodel.draft.metrics import NUM_CONFIDENCE_BINS
from nemo_rl.models.automodel.draft.models.block import BlockInputs, BlockPlan
from nemo_rl.models.automodel.draft.models.dspark import DSparkDraft, DSparkInputs, DSparkTerms
from nemo_rl.models.automodel.draft.models.layers import DraftModule

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["DSparkRuntime", "confidence_metrics"]


class DSparkRuntime(BlockRuntime[DSparkDraftConfig]):
    """See `BlockRuntime`."""

    adapter: ClassVar[DraftAdapter[Any, Any]] = DSparkAdapter()
    module_class: ClassVar[Callable[[Any], DraftModule]] = DSparkDraft

    def parallelize(self, mesh: DeviceMesh) -> None:
        """See `_DraftRuntimeBase.parallelize`; the confidence head computes in fp32, as the engine's does."""
        head = getattr(self.module, "confidence_head", None)
        if isinstance(head, nn.Module):
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
            fully_shard(head, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        super().parallelize(mesh)

    def _reshard(self) -> None:
        super()._reshard()
        head = getattr(self.module, "confidence_head", None)
        if isinstance(head, FSDPModule):
            head.reshard()

    def _inputs(self, common: BlockInputs) -> BlockInputs:
        cfg = self.cfg
        terms = DSparkTerms(
            cross_entropy=cfg.ce_loss_weight,
            l1=cfg.l1_loss_weight,
            confidence=cfg.confidence_loss_weight,
            confidence_column=cfg.confidence_target,
            confidence_detach=cfg.confidence_detach,
        )
        return DSparkInputs(**vars(common), terms=terms)

    def _extra_metrics(self, plan: BlockPlan, table: ElementTable, weights: Tensor, output: BlockLossOutput) -> Metrics:
        terms = {"ce": output.stats[:, STATS.index("cross_entropy")]}
        terms |= {"l1": output.extra["l1"]} if "l1" in output.extra else {}
        out: Metrics = {}
        if "confidence" in output.extra:
            terms["confidence"] = output.extra["confidence_loss"]
            out = confidence_metrics(table, output.extra["confidence"], output.extra["confidence_target"])
        return out | {f"loss_{name}": ((weights * column).sum(), weights.sum()) for name, column in terms.items()}


def confidence_metrics(table: ElementTable, predicted: Tensor, target: Tensor) -> Metrics:
    """How well acceptance is predicted; see `metrics` for the names. Elements count alike, whatever they weigh.

    Args:
        table: of the micro-batch.
        predicted: fp32 [E], in [0, 1].
        target: fp32 [E], what it should be.
    """
    error = predicted - target
    out: Metrics = {}
    for name, values in (("conf_abs_err", error.abs()), ("conf_bias", error), ("conf_brier", error.square())):
        out |= depth_pairs(table, values, name=name)
    of_targets = prefix_pairs(table, target, name="conf_prefix_bias")
    for name, (num, den) in prefix_pairs(table, predicted, name="conf_prefix_bias").items():
        out[name] = (num - of_targets[name][0], den)
    index = (predicted * NUM_CONFIDENCE_BINS).long().clamp(0, NUM_CONFIDENCE_BINS - 1)
    sums = predicted.new_zeros(NUM_CONFIDENCE_BINS, 3)
    sums.index_add_(0, index, torch.stack([predicted, target, torch.ones_like(predicted)], dim=1))
    for i, (of_predicted, of_target, count) in enumerate(sums.unbind(0)):
        out |= {f"conf_bin_{i}": (of_predicted, count), f"conf_bin_target_{i}": (of_target, count)}
    return out
