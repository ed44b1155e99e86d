"""Tiny models for the tests of every package: an untrained Qwen3 directory in about a second."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nemo_rl.data.tiny_policy import build_tiny_tokenizer, tiny_qwen3_config

__all__ = ["build_tiny_tokenizer", "write_tiny_policy"]


def write_tiny_policy(
    directory: str | Path,
    *,
    hidden: int = 64,
    layers: int = 4,
    heads: int = 2,
    kv: int = 1,
    head_dim: int = 32,
    intermediate: int = 192,
    seed: int = 0,
    tie: bool = False,
) -> Path:
    """Write a random Qwen3 with tokenizer that transformers, nemo_automodel and vLLM load.

    Matrices are drawn with a standard deviation of 1/sqrt(fan in), so that attention and MLP matter, and the head gives
    logits of standard deviation about 1.5, so that the most likely token is well separated. Norm weights are random
    around 1: an identity norm would hide a norm that is skipped, doubled or put in the wrong place.

    Args:
        directory: created if absent; files in it are replaced.
        hidden: residual width.
        layers: decoder layers.
        heads: query heads.
        kv: key/value heads.
        head_dim: width of a head.
        intermediate: width of the MLP.
        seed: of the weights.
        tie: tie the head to the embedding (no `lm_head.weight` is written).

    Returns:
        The directory.
    """
    from safetensors.numpy import save_file

    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tiny_tokenizer()
    config = tiny_qwen3_config(
        tokenizer,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv=kv,
        head_dim=head_dim,
        intermediate=intermediate,
        tie=tie,
    )
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, *, std: float | None = None) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * (std or columns**-0.5)).astype(np.float32)

    def norm(width: int) -> np.ndarray:
        return (1.0 + 0.25 * rng.standard_normal(width)).astype(np.float32)

    head_std = 1.5 * hidden**-0.5
    tensors = {"model.embed_tokens.weight": matrix(config.vocab_size, hidden, std=head_std if tie else 0.5)}
    for i in range(layers):
        layer, attention, mlp = f"model.layers.{i}", f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        tensors |= {
            f"{layer}.input_layernorm.weight": norm(hidden),
            f"{attention}.q_proj.weight": matrix(heads * head_dim, hidden),
            f"{attention}.k_proj.weight": matrix(kv * head_dim, hidden),
            f"{attention}.v_proj.weight": matrix(kv * head_dim, hidden),
            f"{attention}.o_proj.weight": matrix(hidden, heads * head_dim),
            f"{attention}.q_norm.weight": norm(head_dim),
            f"{attention}.k_norm.weight": norm(head_dim),
            f"{layer}.post_attention_layernorm.weight": norm(hidden),
            f"{mlp}.gate_proj.weight": matrix(intermediate, hidden),
            f"{mlp}.up_proj.weight": matrix(intermediate, hidden),
            f"{mlp}.down_proj.weight": matrix(hidden, intermediate),
        }
    tensors["model.norm.weight"] = norm(hidden)
    if not tie:
        tensors["lm_head.weight"] = matrix(config.vocab_size, hidden, std=head_std)
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    config.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out
