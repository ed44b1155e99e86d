"""A policy small enough to train on two CPU cores: its tokenizer, its Qwen3 configuration, its chat template.

The tokenizer is a byte-level BPE without merges (any text is representable) plus *phrase tokens*: the fixed question
text of a few reasoning-gym tasks and the answer tags are one token each, so a prompt has 16 tokens instead of about 70.
`tiny_training.py` warm-starts such a model; `tools/make_tiny_policy.py` is the command.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3Config

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"

PHRASES = (
    "State the final answer to the following arithmetic problem:",
    "Spell this word backward (example: sun -> nus):",
    "How many times does the letter",
    "appear in the text:",
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "Solve the following multiplication:",
    "Give only the result as your final answer.",
    "user\n",
    "assistant\n",
)
"""Whole phrases that are one (non-special) token each."""

CHATML_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

VOCAB_MULTIPLE = 64
MAX_POSITIONS = 512

RECORD_FILE = "tiny_policy.json"
POLICY_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
RECIPE_REVISION = 1
"""Raise when the demonstrations, the model or the training change: policies made before are then built again."""


@dataclass(frozen=True)
class TinyPolicySettings:
    """Everything that decides the weights of a warm-started tiny policy."""

    hidden: int = 64
    """Residual width; heads and MLP follow from it."""
    layers: int = 4
    steps: int = 400
    batch_size: int = 64
    learning_rate: float = 3.0e-3
    """Peak of the schedule."""
    warmup_steps: int = 20
    cot: float = 0.4
    """Share of the demonstrations that show work."""
    seed: int = 0
    min_word_len: int = 3
    max_word_len: int = 7

    @property
    def heads(self) -> int:
        """Query heads."""
        return max(2, self.hidden // self.head_dim)

    @property
    def kv(self) -> int:
        """Key/value heads."""
        return self.heads // 2

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return 32

    @property
    def intermediate(self) -> int:
        """Width of the MLP."""
        return 3 * self.hidden

    def fingerprint(self) -> str:
        """Hash of the settings and of the revision of the code that uses them."""
        text = json.dumps({"recipe": RECIPE_REVISION, **dataclasses.asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def read_record(directory: Path) -> dict[str, Any] | None:
    """Read what `tools/make_tiny_policy.py` wrote beside a finished policy.

    Args:
        directory: perhaps a tiny policy.

    Returns:
        The record (`settings`, `fingerprint`, `evaluation`, `versions`, ...), or None where there is no readable one.
    """
    try:
        record = json.loads((directory / RECORD_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def is_up_to_date(directory: Path, settings: TinyPolicySettings) -> bool:
    """Whether a directory holds a complete policy made with exactly these settings."""
    record = read_record(directory)
    if record is None or record.get("fingerprint") != settings.fingerprint():
        return False
    return all((directory / name).is_file() for name in POLICY_FILES)


def build_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Build the byte-level tokenizer with phrase tokens and a ChatML template.

    Returns:
        A fast tokenizer of 271 tokens: 256 bytes, three special tokens, the phrases. End of sequence is `<|im_end|>`.
    """
    # Imported here: the command-line parser and the settings hash need neither library.
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[], fuse_unk=False))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT, IM_START, IM_END])
    backend.add_tokens([AddedToken(phrase, normalized=False) for phrase in PHRASES])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        model_max_length=2 * MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML_TEMPLATE
    return tokenizer


def padded_vocab_size(tokenizer: Any) -> int:
    """Round the tokenizer's length up to a multiple of 64, the embedding's row count."""
    return -(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def tiny_qwen3_config(
    tokenizer: Any,
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv: int,
    head_dim: int,
    intermediate: int,
    tie: bool,
) -> Qwen3Config:
    """Describe a tiny fp32 Qwen3 for a tokenizer.

    Args:
        tokenizer: gives vocabulary size, end-of-sequence and padding ids.
        hidden: residual width.
        layers: decoder layers.
        heads: query heads.
        kv: key/value heads; divides `heads`.
        head_dim: width of a head; vLLM's CPU attention wants 32 or more.
        intermediate: width of the MLP.
        tie: whether the output head is the embedding.

    Returns:
        The configuration, ready to be saved beside weights (`architectures` and `dtype` set).
    """
    from transformers import Qwen3Config  # pulls in torch: only where a model is really made

    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=padded_vocab_size(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=head_dim,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=tie,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.05 if hidden <= 128 else 0.02,
        dtype="float32",
    )
