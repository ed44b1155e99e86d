"""A policy that counts and a draft that has understood counting: real acceptance without training.

Token t has the embedding e_t = (cos, sin)(2 pi k_j t / V) for j = 0..H/2-1 with k_0 = 0, so e_{t+1} is a fixed rotation
R of e_t and every norm is the same. The policy's head holds e_{t-1} in row t: its logits peak at "one more". Its blocks
add a little noise that depends on the context, so that its attention matters and its choice is sometimes another.
The draft projects the policy's last feature by R, its MLP rotates by R once per step (a product of a constant and a
linear path: coordinate 0 is 1 for every token), and its head holds e_t: at depth k it proposes x_i + 2 + k.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_rl.weight_sync.checksum import dtype_name, tensor_checksum
from nemo_rl.weight_sync.interfaces import DRAFT_PREFIX, RefitManifest, RefitPayload, TensorInfo
from nemo_rl.weight_sync.transport import pack_tensors
from tests.tiny_models import write_tiny_policy

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 64, 2, 1, 32, 192
SHARPNESS = 3.0
AUX_IDS = (1, 2, 3)

Weights = dict[str, Tensor]


def write_counting_policy(directory: Path, *, tie: bool = False) -> Weights:
    """Write the policy; returns its tensors (float32, checkpoint names)."""
    write_tiny_policy(
        directory, hidden=HIDDEN, heads=HEADS, kv=KV_HEADS, head_dim=HEAD_DIM, intermediate=INTERMEDIATE, tie=tie
    )
    weights = load_file(str(directory / "model.safetensors"))
    vocab_size = weights["model.embed_tokens.weight"].shape[0]
    points = _points(vocab_size)
    weights["model.embed_tokens.weight"] = points
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(0.3)
    if not tie:
        head = points.roll(1, 0) * (SHARPNESS / math.sqrt(HIDDEN))
        head[_eos(directory)] = 0.0
        head[_eos(directory), 0] = -5.0  # never sampled: responses have their full length
        weights["lm_head.weight"] = head.contiguous()
    save(directory, weights)
    return weights


def write_counting_draft(directory: Path, policy_dir: Path, *, head: Tensor | None = None) -> Weights:
    """Write the draft; returns its tensors (float32, export names). `head` replaces the one that counts."""
    config = json.loads((policy_dir / "config.json").read_text())
    points = _points(config["vocab_size"])
    rotation = _rotation(config["vocab_size"])
    generator = torch.Generator().manual_seed(7)

    def small(*shape: int) -> Tensor:
        return 0.02 * torch.randn(*shape, generator=generator)

    # rms(e) = 1/sqrt(2), so the norm multiplies by sqrt(2); gate and up see the normed vector.
    gate = torch.zeros(INTERMEDIATE, HIDDEN)
    gate[:, 0] = 20.0 / math.sqrt(2)
    up = torch.zeros(INTERMEDIATE, HIDDEN)
    up[:HIDDEN] = (rotation - torch.eye(HIDDEN)) / math.sqrt(2)
    down = torch.zeros(HIDDEN, INTERMEDIATE)
    down[:, :HIDDEN] = torch.eye(HIDDEN) / 20.0
    layer = "layers.0"
    weights = {
        "fc.weight": torch.cat([torch.zeros(HIDDEN, 2 * HIDDEN), rotation], dim=1),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": points.clone() if head is None else head.clone(),
        f"{layer}.hidden_norm.weight": torch.ones(HIDDEN),
        f"{layer}.input_layernorm.weight": torch.ones(HIDDEN),
        f"{layer}.post_attention_layernorm.weight": torch.ones(HIDDEN),
        f"{layer}.self_attn.q_proj.weight": small(HEADS * HEAD_DIM, 2 * HIDDEN),
        f"{layer}.self_attn.k_proj.weight": small(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        f"{layer}.self_attn.v_proj.weight": small(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        f"{layer}.self_attn.o_proj.weight": small(HIDDEN, HEADS * HEAD_DIM),
        f"{layer}.mlp.gate_proj.weight": gate,
        f"{layer}.mlp.up_proj.weight": up,
        f"{layer}.mlp.down_proj.weight": down,
    }
    directory.mkdir(parents=True, exist_ok=True)
    save(directory, weights)
    draft_config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": config["vocab_size"],
        "draft_vocab_size": config["vocab_size"],
        "max_position_embeddings": config["max_position_embeddings"],
        "rms_norm_eps": config["rms_norm_eps"],
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "num_aux_hidden_states": len(AUX_IDS),
        "eagle_aux_hidden_state_layer_ids": list(AUX_IDS),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(AUX_IDS), "use_aux_hidden_state": True},
    }
    (directory / "config.json").write_text(json.dumps(draft_config))
    return weights


def speculative_config(draft_dir: Path, *, k: int = 3) -> dict[str, object]:
    return {"method": "eagle3", "model": str(draft_dir), "num_speculative_tokens": k}


def save(directory: Path, weights: Weights) -> None:
    save_file(
        {name: t.contiguous() for name, t in weights.items()}, str(directory / "model.safetensors"), {"format": "pt"}
    )


def perturbed(weights: Weights, *, seed: int, scale: float = 0.02) -> Weights:
    """Other values of the same kind: what a few optimizer steps do."""
    generator = torch.Generator().manual_seed(seed)
    return {name: t + scale * torch.randn(t.shape, generator=generator) for name, t in weights.items()}


def make_payload(version: int, policy: Weights, draft: Weights, *, draft_only: bool = False) -> RefitPayload:
    """What the trainer would send."""

    def describe(weights: Weights) -> dict[str, TensorInfo]:
        return {name: TensorInfo(tuple(t.shape), dtype_name(t.dtype)) for name, t in weights.items()}

    wire = {**policy, **{DRAFT_PREFIX + name: t for name, t in draft.items()}}
    return RefitPayload(
        version=version,
        manifest=RefitManifest(policy=describe(policy), draft=describe(draft), draft_only=draft_only),
        checksums={name: tensor_checksum(t) for name, t in wire.items()},
        tensors=pack_tensors(wire.items()),
    )


def _frequencies(vocab_size: int) -> Tensor:
    return 2 * math.pi * torch.arange(HIDDEN // 2).double() / vocab_size


def _rotation(vocab_size: int) -> Tensor:
    """R with e_{t+1} = R e_t."""
    blocks = [torch.tensor([[a.cos(), -a.sin()], [a.sin(), a.cos()]]) for a in _frequencies(vocab_size)]
    return torch.block_diag(*blocks).float()


def _points(vocab_size: int) -> Tensor:
    """float32 [vocab, HIDDEN]: e_t."""
    angles = torch.arange(vocab_size).double()[:, None] * _frequencies(vocab_size)
    points = torch.stack([angles.cos(), angles.sin()], dim=-1).flatten(1)
    return points.float().contiguous()


def _eos(directory: Path) -> int:
    return json.loads((directory / "config.json").read_text())["eos_token_id"]
