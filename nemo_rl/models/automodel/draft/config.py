"""Schema of `policy.draft`: one class per draft algorithm, told apart by `algo`.

A class holds only what its algorithm uses. To add one, subclass `DraftConfigBase`, give it a literal `algo`, and add it
to the `DraftConfig` union at the end of this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from nemo_rl.models.optim_config import ImportPath, SchedulerConfig
from nemo_rl.utils.schema import ConfigModel, FreeForm, NonEmptyStr, Probability

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


_NO_TREE = (
    "the engine (vLLM) has no draft tree, it drafts a chain of "
    "policy.generation.vllm_kwargs.speculative_config.num_speculative_tokens tokens."
)


class DraftConfigBase(ConfigModel):
    """What every draft algorithm shares."""

    serving_methods: ClassVar[tuple[str, ...]] = ()
    """Values of the engine's `speculative_config.method` that serve this algorithm."""

    refused_keys: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("total_token*", "depth", "top_k", "*topk", "threshold", "tree_*", "*_tree"), _NO_TREE
    )
    """See `ConfigModel.refused_keys`."""

    enabled: bool = False
    """Train a draft beside the policy, and let the engine propose tokens with it."""

    model_name: NonEmptyStr | None = None
    """Directory or hub name of the draft checkpoint; null = build a new draft from the policy."""

    serve: bool = True
    """Let the engine propose tokens with the draft. false trains it only; the engine then decodes without it."""

    static: bool = False
    """Serve the draft of `model_name` as it is: no training, no updates of it in the engine."""

    loss_weight: NonNegativeFloat = 1.0
    """Factor of the draft loss. 0 serves the draft without training it."""

    train_global_batch_size: PositiveInt | None = None
    """Samples per optimizer step of the draft; null = `policy.train_global_batch_size`. A divisor of it gives the draft
    several updates on the one forward of the policy, which costs nothing extra: a draft needs more of them."""

    train_every: PositiveInt = 1
    """Train the draft in every n-th step of the run; in the others it is served as it is."""

    warmup_steps: NonNegativeInt = 0
    """Updates over which the draft's learning rate rises linearly to its value; `scheduler` starts behind them."""

    freeze: Annotated[tuple[NonEmptyStr, ...], Field(strict=False)] = ()
    """Parts of the draft that keep their values, by the first words of their tensor names, e.g. `[lm_head, layers.0]`;
    they are not trained and not sent to the engine again."""

    num_layers: PositiveInt | None = None
    """Decoder layers of the draft; null = the checkpoint's, or the algorithm's usual number for a new draft."""

    aux_layer_indices: Annotated[tuple[LayerIndex, ...], Field(strict=False, min_length=1)] | None = None
    """Policy layers whose outputs feed the draft, counted from 0, increasing; null = the algorithm's default.
    -1 is the embedding's output (needs `allow_boundary_layers`)."""

    draft_vocab_size: PositiveInt | None = None
    """Token ids that the draft can propose; null = all ids of the policy, or those of `vocab_file`."""

    vocab_file: NonEmptyStr | None = None
    """Which ids a new draft of a reduced vocabulary proposes: a file made by tools/draft_vocab.py; null = none
    needed."""

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
    """Allow a draft checkpoint that is a pickle file (`*.bin`, `*.pt`); it is read with `weights_only`."""

    export_layouts: Annotated[tuple[Literal["native", "speculators"], ...], Field(strict=False, min_length=1)] = (
        "native",
    )
    """Layouts in which checkpoints and the end of the run hold the draft; `native` is `draft/`, which the engine loads,
    another one `draft_<layout>/` beside it."""

    restart: bool = False
    """When a run is resumed, start the draft anew instead of from the checkpoint's, with the settings of this run; the
    policy goes on. For a checkpoint without a draft, or with one of another algorithm or shape. It takes effect once:
    a checkpoint that was written with it is continued while its draft fits."""

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
    def max_num_speculative_tokens(self) -> int | None:
        """Largest K that this configuration trains the draft to propose; None = it sets no limit."""
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

    norm_before_residual: bool | None = None
    """The first layer's residual is the normed hidden state instead of the incoming one; null = the checkpoint's, or
    false for a new draft."""

    norm_output: bool | None = None
    """The hidden state fed to the next depth is the normed one; null as above."""

    fc_norm: bool | None = None
    """One RMSNorm per feature before the fusing projection; null as above. Excludes `norm_before_fc`."""

    norm_before_fc: bool | None = None
    """One RMSNorm over the concatenated features before the fusing projection; null as above. Excludes `fc_norm`."""

    @property
    def max_num_speculative_tokens(self) -> int:
        """Largest K that this draft is trained to propose."""
        return self.ttt_steps


class PEagleDraftConfig(DraftConfigBase):
    """P-EAGLE: the EAGLE-3 draft that proposes all tokens in one forward, from learned placeholders."""

    serving_methods: ClassVar[tuple[str, ...]] = ("eagle3",)

    algo: Literal["peagle"] = "peagle"
    """Draft algorithm."""

    num_depths: PositiveInt | None = None
    """Tokens predicted per forward in training; the draft can propose at most this many. null = the checkpoint's, or 8
    for a new draft."""

    down_sample_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.7
    """Share of the chains that is kept from one depth to the next (conditional drop of deeper depths)."""

    down_sample_ratio_min: Probability = 0.2
    """Least share of the chains that a depth keeps."""

    num_segments: PositiveInt = 1
    """Parts that a micro-batch is computed in, one after the other. From two on each is computed again in the backward
    pass: less memory, more time, the same result."""

    mask_token_id: NonNegativeInt | None = None
    """Token whose embedding stands for tokens not known yet; must be one that never occurs. null = the checkpoint's."""

    norm_before_residual: bool | None = None
    """The first layer's residual is the normed hidden state instead of the incoming one; null = the checkpoint's, or
    false for a new draft."""

    fc_norm: bool | None = None
    """One RMSNorm per feature before the fusing projection; null as above. Excludes `norm_before_fc`."""

    norm_before_fc: bool | None = None
    """One RMSNorm over the concatenated features before the fusing projection; null as above. Excludes `fc_norm`."""

    @property
    def max_num_speculative_tokens(self) -> int | None:
        """Largest K that this draft is trained to propose; None = the checkpoint says."""
        return self.num_depths


class Eagle1DraftConfig(DraftConfigBase):
    """EAGLE-1 and EAGLE-2: an autoregressive draft that predicts the policy's next final hidden state.

    EAGLE-2 is trained the same way; its draft tree is a way of proposing that the engine does not have.
    """

    serving_methods: ClassVar[tuple[str, ...]] = ("eagle",)

    algo: Literal["eagle1", "eagle2"] = "eagle1"
    """Draft algorithm; both names train and serve the same draft."""

    hidden_loss_weight: NonNegativeFloat = 1.0
    """Factor of the smooth-L1 loss between predicted and true hidden state."""

    token_loss_weight: NonNegativeFloat = 0.1
    """Factor of the cross-entropy against the policy's distribution."""

    feature_noise: NonNegativeFloat = 0.0
    """Half-width of the uniform noise added to the input features in training; 0.1 in the paper."""

    mask_rule: Literal["contiguous", "input"] = "contiguous"
    """Which predictions are supervised: `contiguous` = those the engine could use (the token it starts from and the
    predicted one were sampled by the policy); `input` = those whose input token was sampled."""

    replay: bool = True
    """Run the draft on along the sampled tokens, on its own output, as far as the engine does, so that acceptance is
    reported for every proposed token. Trains nothing and costs a forward of the draft, head included, per token beyond
    the first; false reports the first one only."""

    @property
    def max_num_speculative_tokens(self) -> None:
        """No limit: the draft feeds on its own output, at any depth."""
        return None


class BlockDraftConfigBase(DraftConfigBase):
    """What the block drafts share: they fill a block of masked tokens behind an anchor in one forward."""

    block_size: Annotated[int, Field(ge=2)] | None = None
    """Slots of a block, the anchor's included; fixes how many tokens the draft proposes. null = the checkpoint's, or
    for a new draft what `num_speculative_tokens` asks for."""

    num_anchors: PositiveInt = 64
    """Most blocks trained per response and update, drawn at random."""

    loss_decay: PositiveFloat | None = None
    """The k-th predicted token of a block weighs exp(-(k - 1) / this); null = 7 from 16 slots on, 5 from 10, else 4."""

    mask_token_id: NonNegativeInt | None = None
    """Token whose embedding stands for tokens not known yet; must be one that never occurs. null = the checkpoint's."""


class DFlashDraftConfig(BlockDraftConfigBase):
    """DFlash: bidirectional blocks over the policy's features, proposed in one forward."""

    serving_methods: ClassVar[tuple[str, ...]] = ("dflash",)

    algo: Literal["dflash"] = "dflash"
    """Draft algorithm."""

    label: Literal["data", "teacher_argmax", "soft"] = "data"
    """What the cross-entropy compares with: the sampled token, the policy's most likely one, or its distribution."""

    causal: bool | None = None
    """Slots of a block see only earlier ones; null = the checkpoint's, or false for a new draft."""

    @property
    def max_num_speculative_tokens(self) -> int | None:
        """Tokens of a block behind its anchor."""
        return None if self.block_size is None else self.block_size - 1


class DSparkDraftConfig(BlockDraftConfigBase):
    """DSpark: DFlash with a Markov head that ties neighbouring tokens together, and a confidence head."""

    serving_methods: ClassVar[tuple[str, ...]] = ("dspark", "dflash")

    algo: Literal["dspark"] = "dspark"
    """Draft algorithm."""

    sample_from_anchor: bool | None = None
    """The anchor's own slot predicts the first token, so a block proposes as many tokens as it has slots; null = the
    checkpoint's, or true for a new draft."""

    markov_rank: PositiveInt | None = None
    """Rank of the Markov head; null = the checkpoint's, or 256 for a new draft."""

    markov_head_type: Literal["vanilla", "gated", "rnn"] | None = None
    """Form of the Markov head; null = the checkpoint's, or vanilla for a new draft. The engine serves vanilla only; the
    others need `serve: false`."""

    enable_confidence_head: bool | None = None
    """Predict how likely each token is to be accepted; null = the checkpoint's, or true for a new draft."""

    confidence_head_with_markov: bool | None = None
    """The confidence head also reads the Markov embedding of the token before; null as above."""

    confidence_detach: bool = False
    """Keep the confidence loss from reaching the rest of the draft."""

    confidence_target: Literal["overlap", "greedy"] = "overlap"
    """What the confidence head learns: the acceptance rate of sampled proposals, or of greedy ones."""

    ce_loss_weight: NonNegativeFloat = 0.1
    """Factor of the cross-entropy with the sampled tokens."""

    l1_loss_weight: NonNegativeFloat = 0.9
    """Factor of the L1 distance between the distributions of draft and policy (twice the total variation)."""

    confidence_loss_weight: NonNegativeFloat = 1.0
    """Factor of the confidence head's binary cross-entropy."""

    @property
    def max_num_speculative_tokens(self) -> int | None:
        """Tokens that a block predicts."""
        if self.block_size is None or self.sample_from_anchor is None:
            return self.block_size
        return self.block_size if self.sample_from_anchor else self.block_size - 1


class DominoDraftConfig(BlockDraftConfigBase):
    """Domino: DFlash with a recurrent head over the tokens already proposed, which corrects the block's logits."""

    serving_methods: ClassVar[tuple[str, ...]] = ("dflash",)

    algo: Literal["domino"] = "domino"
    """Draft algorithm."""

    shift_label: bool | None = None
    """The anchor's own slot predicts the first token, so a block proposes as many tokens as it has slots; null = the
    checkpoint's, or true for a new draft."""

    emb_dim: PositiveInt | None = None
    """Inner width of the correction; null = the checkpoint's, or 256 for a new draft."""

    gru_hidden_dim: PositiveInt | None = None
    """State of the recurrent head; null = the checkpoint's, or 1024 for a new draft."""

    pure_draft_prefix_len: NonNegativeInt | None = None
    """First predicted tokens of a block that stay uncorrected; null = the checkpoint's, or 1 for a new draft."""

    base_loss_weight: Probability | None = None
    """Share of the loss on the uncorrected logits at the first update, the rest is on the corrected ones; null = 1 for
    a new draft, 0 for a loaded one."""

    base_loss_steps: PositiveInt = 1000
    """Updates of the draft over which that share falls linearly to 0."""

    @property
    def max_num_speculative_tokens(self) -> int | None:
        """Tokens that a block predicts."""
        if self.block_size is None or self.shift_label is None:
            return self.block_size
        return self.block_size if self.shift_label else self.block_size - 1


DefaultDraftConfig = Eagle3DraftConfig
"""What `policy.draft` is when it names no `algo`."""

DraftConfig = Annotated[
    Eagle3DraftConfig
    | PEagleDraftConfig
    | Eagle1DraftConfig
    | DFlashDraftConfig
    | DSparkDraftConfig
    | DominoDraftConfig,
    Field(discriminator="algo"),
]
"""Schema of `policy.draft`: the class whose `algo` it names."""
