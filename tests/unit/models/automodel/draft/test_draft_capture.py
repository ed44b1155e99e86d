"""Features from the policy's own forward: which states, when, and what is left behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM

from nemo_rl.models.automodel.draft.capture import FeatureCapture, find_decoder_layers

IDS = torch.tensor([[5, 9, 200, 31, 8], [7, 7, 1, 90, 12]])


@pytest.fixture(scope="module")
def policy(draft_policy_dir):
    return AutoModelForCausalLM.from_pretrained(draft_policy_dir, attn_implementation="sdpa")


def test_captured_states_are_those_of_the_hidden_states_tuple(policy):
    capture = FeatureCapture((0, 1, 3, 4), num_layers=4)
    with capture(policy):
        out = policy(IDS, output_hidden_states=True)
    states = capture.take(IDS.shape)
    for feature_id, state in zip((0, 1, 3), states, strict=False):
        assert torch.equal(state, out.hidden_states[feature_id])
    # The tuple's last entry is normed; the last layer's output is captured before the final norm.
    torch.testing.assert_close(policy.model.norm(states[3]), out.hidden_states[4])
    assert not torch.allclose(states[3], out.hidden_states[4])
    assert not any(s.requires_grad for s in states)


def test_nothing_is_captured_outside_the_block_and_hooks_are_gone_after_errors(policy):
    capture = FeatureCapture((1,), num_layers=4)
    hooks = [len(layer._forward_hooks) for layer in policy.model.layers]
    policy(IDS)
    with pytest.raises(RuntimeError, match=r"no hidden state was captured for feature ids \[1\]"):
        capture.take(IDS.shape)

    def failing_forward():
        with capture(policy):
            policy(IDS)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing_forward()
    assert [len(layer._forward_hooks) for layer in policy.model.layers] == hooks


def test_states_are_taken_once_and_their_shape_is_checked(policy):
    capture = FeatureCapture((2,), num_layers=4)
    with capture(policy):
        policy(IDS)
    with pytest.raises(RuntimeError, match=r"feature id 2 covers \(2, 5\) positions, the micro-batch has \(2, 6\)"):
        capture.take((2, 6))
    with pytest.raises(RuntimeError, match="no hidden state"):
        capture.take((2, 5))


@pytest.mark.parametrize("kind", ["wrapper", "transformers"])
def test_checkpoint_replays_do_not_overwrite_what_was_captured(draft_policy_dir, kind):
    policy = AutoModelForCausalLM.from_pretrained(draft_policy_dir, attn_implementation="sdpa")
    policy.train()
    if kind == "wrapper":
        for i, layer in enumerate(policy.model.layers):
            policy.model.layers[i] = checkpoint_wrapper(layer)
    else:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
    runs = []
    for layer in policy.model.layers:
        layer.self_attn.register_forward_hook(lambda *a: runs.append(1))
    capture = FeatureCapture((1, 2), num_layers=4)
    with capture(policy):
        logits = policy(IDS, use_cache=False).logits
    held = [capture._captured[i].clone() for i in (1, 2)]
    count = len(runs)
    logits.sum().backward()
    assert len(runs) > count, "nothing was replayed"
    for got, want in zip(capture.take(IDS.shape), held, strict=True):
        assert torch.equal(got, want)


def test_layers_are_found_in_both_kinds_of_container_or_named(policy):
    assert find_decoder_layers(policy, 4) == list(policy.model.layers)

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleDict({str(i): nn.Identity() for i in range(3)})

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Inner()

    assert len(find_decoder_layers(Outer(), 3)) == 3
    with pytest.raises(RuntimeError, match="found no 5 decoder layers"):
        find_decoder_layers(Outer(), 5)
