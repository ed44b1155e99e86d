"""A seventh draft algorithm, in one file: Medusa, K small heads on the policy's final state.

Head k reads the final state g[t] and predicts x[t+2+k]: logits = W_head (g + SiLU(A_k g)), W_head the policy's. In the
tree each part goes to the file of its kind; docs/guides/adding-a-draft.md walks through them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from nemo_rl.models.automodel.draft.acceptance import ElementTable, element_metrics, replay_metrics
from nemo_rl.models.automodel.draft.adapters.base import DraftAdapter, Serving, SourceConfig
from nemo_rl.models.automodel.draft.adapters.fields import read_geometry, written_geometry
from nemo_rl.models.automodel.draft.architecture import DraftArchitecture, Shapes
from nemo_rl.models.automodel.draft.capture import full_tensor
from nemo_rl.models.automodel.draft.config import DraftConfigBase
from nemo_rl.models.automodel.draft.losses import STATS, LossChunks, soft_distillation
from nemo_rl.models.automodel.draft.models.layers import DraftModule, zero_of
from nemo_rl.models.automodel.draft.publish import PublishContract
from nemo_rl.models.automodel.draft.runtime import DraftLoss, _DraftRuntimeBase, charged_depths, sampled_tokens
from nemo_rl.models.automodel.draft.trunk import predicted_tokens


# 1. config.py: what the user may set.
class MedusaDraftConfig(DraftConfigBase):
    """Medusa: independent heads on the policy's final state."""

    serving_methods: ClassVar[tuple[str, ...]] = ("medusa",)

    algo: Literal["medusa"] = "medusa"
    """Draft algorithm."""

    num_heads: PositiveInt | None = None
    """Heads, one per proposed token; null = the checkpoint's, or 3 for a new draft."""

    @property
    def max_num_speculative_tokens(self) -> int | None:
        """One token per head."""
        return self.num_heads


# 2. architecture.py: the shape of a draft as a value, and its tensors.
@dataclass(frozen=True, kw_only=True)
class MedusaArchitecture(DraftArchitecture):
    """Medusa.

    Attributes:
        num_heads: K.
    """

    reads_final_state: ClassVar[bool] = True
    num_heads: int

    def trained_shapes(self) -> Shapes:
        """One matrix per head; the names are those that vLLM loads."""
        return {f"blocks.{k}.layers.0.weight": (self.hidden_size, self.hidden_size) for k in range(self.num_heads)}


# 3. adapters/medusa.py: config.json both ways, checks, how an engine serves it. No torch.
class MedusaAdapter(DraftAdapter[MedusaDraftConfig, MedusaArchitecture]):
    """See the module docstring."""

    algo: ClassVar[str] = "medusa"
    architecture: ClassVar[type[DraftArchitecture]] = MedusaArchitecture
    k_rule: ClassVar[str] = "at most `num_heads`"
    switches: ClassVar[Mapping[str, Any]] = {"num_heads": 3}
    depth_key: ClassVar[str] = "num_heads"

    def default_feature_ids(self, num_layers: int) -> tuple[int, ...]:
        """None: the draft reads the final state."""
        return ()

    def claims(self, raw: Mapping[str, Any]) -> bool:
        """Whether a config.json says that it describes such a draft."""
        return raw.get("architectures") == ["MedusaModel"]

    def read_config(self, raw: Mapping[str, Any]) -> SourceConfig:
        """Read its config.json."""
        fields = read_geometry(raw, "llama")
        return SourceConfig("nemo_rl", fields | {"num_heads": raw["num_heads"], "extra": {}}, feature_ids=None)

    def check(self, cfg: MedusaDraftConfig, arch: MedusaArchitecture, *, policy: Mapping[str, Any], k: Any) -> None:
        """Nothing beyond what is checked for all."""

    def max_num_speculative_tokens(self, cfg: MedusaDraftConfig, arch: MedusaArchitecture) -> int | None:
        """One token per head."""
        return arch.num_heads

    def write_config(self, arch: MedusaArchitecture, *, dtype: str) -> dict[str, Any]:
        """The config.json of an export."""
        own = {"architectures": ["MedusaModel"], "num_heads": arch.num_heads, "original_lm_head": True}
        return written_geometry(arch, dtype=dtype, algo=self.algo) | own

    def serving(self, arch: MedusaArchitecture, *, device: str | None) -> Serving:
        """The engine's method."""
        return Serving("medusa")


# 4. models/medusa.py: the module; one call runs forward and loss.
class MedusaInputs(NamedTuple):
    """What one micro-batch computes, E elements: `row` of `states` and `depth` of each, int64 [E]."""

    states: Tensor
    row: Tensor
    depth: Tensor
    labels: Tensor
    chunks: LossChunks
    head: Tensor
    teacher_logits: Tensor
    weights: Tensor


class MedusaDraft(DraftModule):
    """K residual heads."""

    def __init__(self, arch: MedusaArchitecture) -> None:
        super().__init__()
        width = arch.hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(width, width, bias=False)])})
            for _ in range(arch.num_heads)
        )

    def forward(self, inputs: MedusaInputs | None) -> Any:
        """Loss and stats of a micro-batch; without one, a zero that reaches every parameter."""
        if inputs is None:
            return DraftLoss(zero_of(self), {})
        g = inputs.states[inputs.row]
        heads = torch.stack([g + F.silu(block["layers"][0](g)) for block in self.blocks])
        hidden = heads[inputs.depth, torch.arange(len(g), device=g.device)]
        return soft_distillation(
            hidden,
            inputs.head,
            inputs.teacher_logits,
            weights=inputs.weights,
            labels=inputs.labels,
            chunks=inputs.chunks,
            vocab_ids=None,
            drop_out_of_vocab=False,
        )


# 5. medusa.py: the runtime, which plans what is supervised and hands it to the module.
class MedusaRuntime(_DraftRuntimeBase[MedusaDraftConfig]):
    """Training of Medusa heads on the policy's own forward."""

    adapter: ClassVar[DraftAdapter[Any, Any]] = MedusaAdapter()
    module_class: ClassVar[Callable[[Any], DraftModule]] = MedusaDraft
    contract: ClassVar[PublishContract] = PublishContract(trains_lm_head=False, trains_embeddings=False)

    def _charged(self, sampled: Tensor, doc_ids: Tensor) -> Tensor:
        return charged_depths(sampled, doc_ids, depths=self.spec.architecture.num_heads, mask_rule="contiguous")

    def _plan(self, data: Any, *, step: int) -> Tensor:
        return self._charged(*sampled_tokens(data)).sum().reshape(1)

    def _set_denominators(self, counts: Tensor) -> None:
        self._total = counts[0].clamp(min=1).float()

    def loss(self, mb: Any, policy_logits: Tensor) -> DraftLoss:
        """Draft loss of a micro-batch."""
        (states,) = self._capture.take(mb.input_ids.shape)
        charged = self._charged(mb.sampled_mask.cpu(), mb.doc_ids.cpu()).flatten(1)
        if not bool(charged.any()):
            return DraftLoss(self.zero_loss(), {})
        depth, place = charged.nonzero(as_tuple=True)
        order = (place + 1 + depth).argsort(stable=True)
        depth, place = depth[order], place[order]
        # The engine starts from the state behind x[t]: its own token is x[t+1], head k proposes x[t+2+k].
        teacher = place + 1 + depth
        places = charged[0].nonzero().squeeze(1)
        slot = torch.searchsorted(places, place)
        labels = predicted_tokens(mb.input_ids.cpu(), mb.doc_ids.cpu(), teacher)
        chains = charged[:, places].long().cumprod(0).bool().T.contiguous()
        table = ElementTable(slot, depth, labels >= 0, chains, chains, places, torch.ones(len(places)).bool())
        device = self._device
        inputs = MedusaInputs(
            states=states.flatten(0, 1),
            row=place.to(device),
            depth=depth.to(device),
            labels=labels.to(device),
            chunks=LossChunks.build(teacher, chunk_size=self.cfg.loss_chunk_size).to(device),
            head=self._head,
            teacher_logits=full_tensor(policy_logits).flatten(0, 1)[:, : self.spec.architecture.vocab_size],
            weights=torch.ones(len(place), device=device) / self._total,
        )
        loss, stats = self.module(inputs)
        columns = {name: stats[:, i] for i, name in enumerate(STATS)}
        metrics = {"loss": (loss.detach(), loss.new_tensor(float(len(place))) / self._total)}
        metrics |= element_metrics(table, columns)
        return DraftLoss(loss, metrics | replay_metrics(table, columns["hit"], k=self.spec.num_speculative_tokens))
