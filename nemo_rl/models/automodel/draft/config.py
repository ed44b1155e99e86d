"""Schema of `policy.draft`: one class per draft algorithm, told apart by `algo`.

A class holds only what its algorithm uses. To add one, subclass `DraftConfigBase`, give it a literal `algo`, and add it
to the `DraftConfig` union at the end of this file.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from nemo_rl.models.optim_config import ImportPath, SchedulerConfig
from nemo_rl.utils.schema import ConfigModel, FreeForm, NonEmptyStr

LayerIndex = Annotated[int, Field(ge=-1)]
"""Layer of the policy, counted from 0; -1 = the embedding."""


class DraftOptimizerConfig(ConfigModel):
    """The optimizer group of the draft."""

    name: ImportPath | None = None
    """Dotted path of the optimizer class; null = the policy's class (`policy.optimizer.name`)."""

    kwargs: FreeForm = Field(
        default_factory=lambda: {"lr": None, "weight_decay": 0.0, "betas": [0.9, 0.95], "eps": 1.0e-8}
    )
    """Arguments of the optimizer class; `lr: null` = 1e-4 for a draft built from scratch, 1e-5 for a loaded one.
    Giving this block replaces the whole default block."""


class DraftConfigBase(ConfigModel):
    """What every draft algorithm shares."""

    serving_methods: ClassVar[tuple[str, ...]] = ()
    """Values of the engine's `speculative_config.method` that serve this algorithm."""

    enabled: bool = False
    """Train a draft beside the policy, and let the engine propose tokens with it."""

    model_name: NonEmptyStr | None = None
    """Directory of the draft checkpoint; null = build a new draft from the policy."""

    loss_weight: NonNegativeFloat = 1.0
    """Factor of the draft loss. 0 serves the draft without training it."""

    train_global_batch_size: PositiveInt | None = None
    """Samples per optimizer step of the draft; null = `policy.train_global_batch_size`. A divisor of it gives the draft
    several updates on the one forward of the policy, which costs nothing extra: a draft needs more of them."""

    num_layers: PositiveInt = 1
    """Decoder layers of the draft."""

    aux_layer_indices: Annotated[tuple[LayerIndex, ...], Field(strict=False, min_length=1)] | None = None
    """Policy layers whose outputs feed the draft, counted from 0, increasing; null = the algorithm's default.
    -1 is the embedding's output (needs `allow_boundary_layers`)."""

    draft_vocab_size: PositiveInt | None = None
    """Token ids that the draft can propose; null = all ids of the policy."""

    intermediate_size: PositiveInt | None = None
    """Width of the draft's MLP; null = the policy's."""

    num_attention_heads: PositiveInt | None = None
    """Query heads of the draft; null = the policy's."""

    num_key_value_heads: PositiveInt | None = None
    """Key and value heads of the draft; null = the policy's."""

    head_dim: PositiveInt | None = None
    """Width of one attention head of the draft; null = the policy's."""

    loss_chunk_size: PositiveInt = 1024
    """Supervised positions whose logits are held at once. Changes memory, not the result."""

    max_grad_norm: PositiveFloat = 1.0
    """The draft's gradient is scaled down to this norm, apart from the policy's."""

    seed: NonNegativeInt | None = None
    """Seed of the draft's initialisation and draws; null = `grpo.seed`."""

    allow_boundary_layers: bool = False
    """Allow features from the embedding (-1) and the last layer; the engine hands out the last one before its norm."""

    trust_pickle: bool = False
    """Allow a draft checkpoint that is a pickle file (`*.bin`, `*.pt`), which can run code when it is read."""

    optimizer: DraftOptimizerConfig = Field(default_factory=DraftOptimizerConfig)
    """The draft's optimizer group."""

    scheduler: SchedulerConfig | None = None
    """Learning-rate schedules of the draft; null = constant."""

    @field_validator("aux_layer_indices")
    @classmethod
    def _is_increasing(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and list(value) != sorted(set(value)):
            raise ValueError("must be strictly increasing; the engine sorts the ids and drops repeated ones")
        return value

    @property
    def max_num_speculative_tokens(self) -> int:
        """Largest K that this draft is trained to propose."""
        raise NotImplementedError(f"{type(self).__name__} must say how many tokens its draft can propose")


class Eagle3DraftConfig(DraftConfigBase):
    """EAGLE-3: an autoregressive draft on fused policy features, trained by unrolling (test-time training)."""

    serving_methods: ClassVar[tuple[str, ...]] = ("eagle3",)

    algo: Literal["eagle3"] = "eagle3"
    """Draft algorithm."""

    ttt_steps: PositiveInt = 7
    """Depths unrolled in training; the draft can propose at most this many tokens."""

    ttt_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """Weight of depth k is this number to the power k, normalised over the depths."""

    mask_rule: Literal["contiguous", "input"] = "contiguous"
    """Which predictions are supervised: `contiguous` = those the engine could use (the token it starts from, the
    predicted token and all between were sampled by the policy); `input` = those whose input token was sampled."""

    drop_out_of_vocab: bool = False
    """Give no loss to positions whose most likely token is outside the draft vocabulary; the denominator keeps them."""

    norm_before_residual: bool = False
    """The first layer's residual is the normed hidden state instead of the incoming one."""

    norm_output: bool = False
    """The hidden state fed to the next depth is the normed one."""

    fc_norm: bool = False
    """One RMSNorm per feature before the fusing projection. Excludes `norm_before_fc`."""

    norm_before_fc: bool = False
    """One RMSNorm over the concatenated features before the fusing projection. Excludes `fc_norm`."""

    @property
    def max_num_speculative_tokens(self) -> int:
        """Largest K that this draft is trained to propose."""
        return self.ttt_steps


DefaultDraftConfig = Eagle3DraftConfig
"""What `policy.draft` is when it names no `algo`."""

DraftConfig = Annotated[Eagle3DraftConfig, Field()]
"""Schema of `policy.draft`. With a second class: ``Annotated[A | B, Field(discriminator="algo")]``."""
