"""Block drafts with a left-to-right head in the engine, against a plain recomputation of every proposal.

Weights are random. So that drafting behind accepted tokens is tested too, the verifier is handed the tokens that the
policy is going to choose, up to a random length, in place of the proposal; the proposal itself is recorded.
The reference recomputes a proposal in float64 from the whole prefix, with hidden states of transformers.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from vllm import ModelRegistry
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.worker import gpu_model_runner

from nemo_rl.errors import ConfigError
from nemo_rl.models.generation.config import VllmConfig
from nemo_rl.models.generation.vllm import engine_worker, weight_transfer
from nemo_rl.models.generation.vllm.draft_extension import install_draft_extension
from nemo_rl.models.generation.vllm.readback import ModelTensors
from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorker, release_beside_another
from tests.unit.models.generation.vllm import counting_models as counting
from tests.unit.models.generation.vllm.conftest import MAX_LEN, generation_config, make_worker, prompts

H, HEADS, KV, HEAD_DIM, INTERMEDIATE = (
    counting.HIDDEN,
    counting.HEADS,
    counting.KV_HEADS,
    counting.HEAD_DIM,
    counting.INTERMEDIATE,
)
LAYERS, REDUCED, RANK, STATE, INNER = 2, 160, 24, 40, 16
MASK_ID, LAYER_OUTPUTS = 319, (0, 2)
TEMPERATURE = 1.3
SERVING = "nemo_rl.models.automodel.draft.serving"
DATA = prompts(5, seed=11)

Weights = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Draft:
    """What a draft is; `head` names its file in the serving package, "" has none."""

    head: str
    k: int
    from_anchor: bool = False
    uncorrected: int = 0
    draft_vocab: int | None = None
    samples_drafts: bool = False

    @property
    def num_slots(self) -> int:
        return self.k if self.from_anchor else self.k + 1


DRAFTS = {
    "markov-anchor": Draft("dspark", 4, from_anchor=True),
    "markov-fill-in-reduced": Draft("dspark", 3, draft_vocab=REDUCED, samples_drafts=True),
    "gru-anchor": Draft("domino", 4, from_anchor=True, uncorrected=1, samples_drafts=True),
    "gru-fill-in-reduced": Draft("domino", 3, uncorrected=1, draft_vocab=REDUCED),
    "no-head": Draft("", 3),  # beside an extension that was installed for others
}


def make_weights(draft: Draft, policy: Weights, *, seed: int) -> Weights:
    """Every trained tensor at random, large enough to decide the proposals."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return gain * torch.randn(rows, columns, generator=generator) * columns**-0.5

    def norm(width: int) -> Tensor:
        return 1 + 0.3 * torch.randn(width, generator=generator)

    weights = {"fc.weight": matrix(H, len(LAYER_OUTPUTS) * H), "hidden_norm.weight": norm(H), "norm.weight": norm(H)}
    for i in range(LAYERS):
        attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        weights |= {
            f"layers.{i}.input_layernorm.weight": norm(H),
            f"{attention}.q_proj.weight": matrix(HEADS * HEAD_DIM, H, 2.0),
            f"{attention}.k_proj.weight": matrix(KV * HEAD_DIM, H, 2.0),
            f"{attention}.v_proj.weight": matrix(KV * HEAD_DIM, H, 3.0),
            f"{attention}.o_proj.weight": matrix(H, HEADS * HEAD_DIM, 2.0),
            f"{attention}.q_norm.weight": norm(HEAD_DIM),
            f"{attention}.k_norm.weight": norm(HEAD_DIM),
            f"layers.{i}.post_attention_layernorm.weight": norm(H),
            f"{mlp}.gate_proj.weight": matrix(INTERMEDIATE, H),
            f"{mlp}.up_proj.weight": matrix(INTERMEDIATE, H),
            f"{mlp}.down_proj.weight": matrix(H, INTERMEDIATE),
        }
    vocab = policy["lm_head.weight"].shape[0]
    rows = draft.draft_vocab or vocab
    if draft.draft_vocab:
        weights["lm_head.weight"] = matrix(rows, H, 2.0)
    if draft.head == "dspark":
        weights |= {
            "markov_head.markov_w1.weight": matrix(vocab, RANK, RANK**0.5),
            "markov_head.markov_w2.weight": matrix(rows, RANK, 2.0),
            "confidence_head.proj.weight": matrix(1, H + RANK),
            "confidence_head.proj.bias": matrix(1, 1)[0],
        }
    if draft.head == "domino":
        weights |= {
            "prefix_gru.weight_ih_l0": matrix(3 * STATE, H, 3.0),
            "prefix_gru.weight_hh_l0": matrix(3 * STATE, STATE, 2.0),
            "embed_proj.0.weight": matrix(INNER, H + STATE, 3.0),
            "embed_proj.2.weight": matrix(rows, INNER, 3.0),
        }
    return weights


def vocabulary(draft: Draft, vocab: int) -> Tensor | None:
    """int64 [D]: target id of each draft id, in no order; None when it is the target's vocabulary."""
    if draft.draft_vocab is None:
        return None
    return torch.randperm(vocab, generator=torch.Generator().manual_seed(5))[: draft.draft_vocab]


def write_draft(draft: Draft, directory: Path, policy_dir: Path, weights: Weights, **config: Any) -> dict[str, Any]:
    """Write the directory as an export does; returns the engine's speculative config."""
    policy = json.loads((policy_dir / "config.json").read_text())
    block: dict[str, Any] = {"mask_token_id": MASK_ID, "target_layer_ids": list(LAYER_OUTPUTS)}
    top: dict[str, Any] = {}
    if draft.head == "dspark":
        top = {
            "sample_from_anchor": draft.from_anchor,
            "markov_rank": RANK,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
    if draft.head == "domino":
        block |= {
            "projector_type": "domino",
            "emb_dim": INNER,
            "gru_hidden_dim": STATE,
            "pure_draft_prefix_len": draft.uncorrected,
            "shift_label": draft.from_anchor,
        }
    architecture = {"dspark": "Qwen3DSparkModel", "domino": "DominoDraftModel", "": "DFlashDraftModel"}[draft.head]
    directory.mkdir(parents=True)
    static = {}
    ids = vocabulary(draft, policy["vocab_size"])
    if ids is not None:
        static["d2t"] = ids - torch.arange(len(ids))
    counting.save(directory, {**weights, **static})
    (directory / "config.json").write_text(
        json.dumps(
            {
                "architectures": [architecture],
                "model_type": "qwen3",
                "hidden_size": H,
                "intermediate_size": INTERMEDIATE,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS,
                "num_key_value_heads": KV,
                "head_dim": HEAD_DIM,
                "hidden_act": "silu",
                "rms_norm_eps": policy["rms_norm_eps"],
                "rope_theta": 10000.0,
                "attention_bias": False,
                "vocab_size": policy["vocab_size"],
                "draft_vocab_size": draft.draft_vocab or policy["vocab_size"],
                "max_position_embeddings": policy["max_position_embeddings"],
                "tie_word_embeddings": False,
                "torch_dtype": "float32",
                "block_size": draft.num_slots,
                "dflash_config": block,
                **top,
                **config,
            }
        )
    )
    spec = {"method": "dflash", "model": str(directory), "num_speculative_tokens": draft.k}
    return spec | ({"draft_sample_method": "probabilistic"} if draft.samples_drafts else {})


# ------------------------------------------------------------------ the reference


@dataclasses.dataclass(frozen=True)
class Reference:
    """A draft in float64. The last fields put an error in: each must make the comparison fail.

    Attributes:
        draft: What it is.
        weights: Its tensors; the embedding and, with the full vocabulary, the head are the policy's.
        policy: The policy's tensors.
        model: The policy in transformers.
        wrong_layer: Added to the layers whose output is read.
        wrong_position: Added to the positions of the slots.
        wrong_masks: Added to the number of mask slots.
        wrong_previous: Each token is corrected by the one that many places further back.
        wrong_uncorrected: Added to the number of leading tokens without correction.
    """

    draft: Draft
    weights: Weights
    policy: Weights
    model: torch.nn.Module
    wrong_layer: int = 0
    wrong_position: int = 0
    wrong_masks: int = 0
    wrong_previous: int = 0
    wrong_uncorrected: int = 0

    def features(self, tokens: Sequence[int]) -> Tensor:
        """float64 [tokens, 2 H]; causal, so a prefix's are the first of them."""
        with torch.no_grad():
            states = self.model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
        return torch.cat([states[layer + 1 + self.wrong_layer][0] for layer in LAYER_OUTPUTS], -1).double()

    def propose(self, context: Tensor, sampled: int, forced: Sequence[int] | None = None) -> tuple[list[int], Tensor]:
        """Draft K tokens.

        Args:
            context: float64 [n, 2 H], features of the verified tokens.
            sampled: The token behind them.
            forced: Tokens to go on with, instead of the most likely ones.

        Returns:
            The most likely target ids, and the logits, float64 [K, V].
        """
        states = self.slot_states(context, sampled)
        states = states[: self.draft.k] if self.draft.from_anchor else states[1 : self.draft.k + 1]
        base = states @ self._w("lm_head.weight").T
        ids = vocabulary(self.draft, len(self.policy["lm_head.weight"]))
        logits = torch.full((self.draft.k, len(self.policy["lm_head.weight"])), -torch.inf, dtype=torch.float64)
        known, chosen = [sampled], []
        for i in range(self.draft.k):
            visible = known[: len(known) - self.wrong_previous] or known[:1]
            row = base[i] + self.correction(states[i], visible, ordinal=i + 1)
            logits[i, slice(None) if ids is None else ids] = row
            chosen.append(int(logits[i].argmax()))
            known.append(chosen[i] if forced is None else forced[i])
        return chosen, logits

    def correction(self, state: Tensor, known: list[int], *, ordinal: int) -> Tensor:
        """float64 [D] (or 0) for the token of `ordinal` behind the block's known tokens."""
        if self.draft.head == "dspark":
            return self._w("markov_head.markov_w2.weight") @ self._w("markov_head.markov_w1.weight")[known[-1]]
        if self.draft.head != "domino" or ordinal <= self.draft.uncorrected + self.wrong_uncorrected:
            return torch.zeros(())
        gru = torch.nn.GRU(H, STATE, bias=False).double()
        gru.load_state_dict({name: self._w(f"prefix_gru.{name}") for name in ("weight_ih_l0", "weight_hh_l0")})
        with torch.no_grad():
            summary = gru(self._w("embed_tokens.weight")[known])[1][0]
        inner = torch.nn.functional.silu(self._w("embed_proj.0.weight") @ torch.cat([state, summary]))
        return self._w("embed_proj.2.weight") @ inner

    def slot_states(self, context: Tensor, sampled: int) -> Tensor:
        """float64 [slots, H]: the block's outputs. Slots see the whole context and each other."""
        length = len(context)
        keys = self._norm(context @ self._w("fc.weight").T, "hidden_norm")
        masks = self.draft.num_slots - 1 + self.wrong_masks
        x = self._w("embed_tokens.weight")[[sampled] + [MASK_ID] * masks]
        slots = torch.arange(len(x)) + length + self.wrong_position
        for i in range(LAYERS):
            y, attention = self._norm(x, f"layers.{i}.input_layernorm"), f"layers.{i}.self_attn"
            q = self._heads(y, attention, "q", slots)
            k = torch.cat(
                [self._heads(keys, attention, "k", torch.arange(length)), self._heads(y, attention, "k", slots)]
            )
            v = torch.cat([keys, y]) @ self._w(f"{attention}.v_proj.weight").T
            v = v.view(-1, KV, HEAD_DIM)
            k, v = (t.repeat_interleave(HEADS // KV, dim=1) for t in (k, v))
            weights = (torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5).softmax(-1)
            mixed = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
            x = x + mixed @ self._w(f"{attention}.o_proj.weight").T
            y, mlp = self._norm(x, f"layers.{i}.post_attention_layernorm"), f"layers.{i}.mlp"
            gate, up = (y @ self._w(f"{mlp}.{part}_proj.weight").T for part in ("gate", "up"))
            x = x + (torch.nn.functional.silu(gate) * up) @ self._w(f"{mlp}.down_proj.weight").T
        return self._norm(x, "norm")

    def _heads(self, x: Tensor, attention: str, part: str, positions: Tensor) -> Tensor:
        heads = (x @ self._w(f"{attention}.{part}_proj.weight").T).view(len(x), -1, HEAD_DIM)
        heads = self._norm(heads, f"{attention}.{part}_norm")
        angles = positions[:, None].double() / 10000.0 ** (torch.arange(HEAD_DIM // 2).double() / (HEAD_DIM // 2))
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        turned = torch.complex(*heads.chunk(2, -1)) * turn
        return torch.cat([turned.real, turned.imag], -1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self._w(f"{name}.weight")

    def _w(self, name: str) -> Tensor:
        if name in self.weights:
            return self.weights[name].double()
        return self.policy["lm_head.weight" if name == "lm_head.weight" else f"model.{name}"].double()


# ------------------------------------------------------------------ the engine


@dataclasses.dataclass(frozen=True)
class Proposal:
    """`tokens` were proposed behind the `verified` tokens of a text and the `sampled` one.

    Attributes:
        row: Of the text in its batch.
        verified: Number of tokens that the policy had read.
        sampled: The token behind them.
        tokens: K target ids.
        probs: float [K, V] that they were drawn from, if the engine kept it.
    """

    row: int
    verified: int
    sampled: int
    tokens: list[int]
    probs: Tensor | None


class Engine:
    """An engine whose proposals are recorded; see the module's docstring for what the verifier gets."""

    def __init__(self, draft: Draft, directory: Path, policy_dir: Path) -> None:
        self.draft, self.version = draft, -1
        self.policy = load_file(str(policy_dir / "model.safetensors"))
        self.weights = make_weights(draft, self.policy, seed=1)
        self.worker = make_worker(policy_dir, generation_config(max_new_tokens=20, temperature=TEMPERATURE))
        self.worker.build(
            speculative_config=write_draft(draft, directory, policy_dir, self.weights),
            trained_draft_tensors=tuple(self.weights),
            draft_extension=f"{SERVING}.{draft.head or 'domino'}:install",
        )
        self.proposals: list[Proposal] = []
        self._coming: list[list[int]] = []
        runner = model_runner(self.worker)
        self.proposer = runner.drafter
        propose, coin = self.proposer.propose, torch.Generator().manual_seed(0)

        def recording(**kwargs: Any) -> Tensor:
            out = propose(**kwargs)
            handed_on, probs = out.clone(), self.proposer.take_last_draft_probs()
            last = kwargs["token_indices_to_sample"]
            last = kwargs["common_attn_metadata"].query_start_loc[1:] - 1 if last is None else last
            for i, request in enumerate(runner.input_batch.req_ids):
                row = self._row(runner.requests[request].prompt_token_ids)
                if row is None:
                    continue
                verified = int(kwargs["target_positions"][last[i]]) + 1
                self.proposals.append(
                    Proposal(
                        row,
                        verified,
                        int(kwargs["next_token_ids"][i]),
                        out[i].tolist(),
                        None if probs is None else probs[i].clone(),
                    )
                )
                coming = self._coming[row][verified + 1 :] if self._coming else []
                right = min(int(torch.randint(draft.k + 1, (1,), generator=coin)), len(coming))
                handed_on[i, :right] = torch.tensor(coming[:right], dtype=out.dtype)
            return handed_on

        self.proposer.propose = recording

    def run(self, *, coming: list[list[int]] | None = None, greedy: bool = True) -> list[list[int]]:
        """Generate for `DATA`; returns prompt and response of each row and fills `proposals`.

        Args:
            coming: Texts of an earlier run, from which accepted tokens are taken.
            greedy: Or sample.
        """
        self.proposals.clear()
        self._coming = coming or []
        out = self.worker.generate(DATA, greedy=greedy)
        lengths = out["unpadded_sequence_lengths"].tolist()
        texts = [ids[:length].tolist() for ids, length in zip(out["output_ids"], lengths, strict=True)]
        # Behind the last token of a text nothing is verified any more.
        self.proposals = [p for p in self.proposals if p.verified < lengths[p.row]]
        assert all(texts[p.row][p.verified] == p.sampled for p in self.proposals)
        assert len(self.proposals) > 25
        return texts

    def update(self, weights: Weights, policy: Weights | None = None) -> None:
        self.weights, self.policy, self.version = weights, policy or self.policy, self.version + 1
        report = self.worker.update_weights(counting.make_payload(self.version, self.policy, weights))
        assert report.num_checked == len(self.policy) + len(weights)
        assert report.unchecked == ()

    def reference(self, model: torch.nn.Module, **wrong: int) -> Reference:
        return Reference(self.draft, self.weights, self.policy, model, **wrong)

    def agreement(self, reference: Reference, texts: list[list[int]], *, limit: int | None = None) -> float:
        """Share of the (first `limit`) recorded proposals that the reference repeats."""
        features = [reference.features(text) for text in texts]
        checked = self.proposals[:limit]
        same = [reference.propose(features[p.row][: p.verified], p.sampled)[0] == p.tokens for p in checked]
        return sum(same) / len(same)

    @staticmethod
    def _row(prompt: list[int]) -> int | None:
        rows = enumerate(DATA["input_ids"].tolist())
        return next((row for row, ids in rows if ids[: len(prompt)] == prompt), None)


def model_runner(worker: VllmGenerationWorker) -> Any:
    return worker._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def policy_choices(model: torch.nn.Module, text: list[int]) -> list[int]:
    """The policy's most likely token behind each prefix."""
    with torch.no_grad():
        return model(torch.tensor([text])).logits[0].argmax(-1).tolist()


@pytest.fixture(scope="module", params=DRAFTS)
def engine(
    request: pytest.FixtureRequest, model_dirs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    made = Engine(DRAFTS[request.param], tmp_path_factory.mktemp("drafts") / request.param, model_dirs[0])
    yield made
    release_beside_another(made.worker._llm)


@pytest.fixture(scope="module")
def texts(engine: Engine) -> list[list[int]]:
    return engine.run()


def test_greedy_proposals_are_the_references_and_tokens_the_policys(
    engine: Engine, texts: list[list[int]], reference_model
) -> None:
    for text, length in zip(texts, DATA["input_lengths"].tolist(), strict=True):
        assert policy_choices(reference_model, text)[length - 1 : -1] == text[length:]
    before = engine.worker.spec_counters()
    assert engine.run(coming=texts) == texts
    rates = (engine.worker.spec_counters() - before).per_position_rates
    assert 0.1 < min(rates) < max(rates) < 0.95, rates
    assert len({token for p in engine.proposals for token in p.tokens}) > 10, "a constant chain would hide an error"
    assert engine.agreement(engine.reference(reference_model), texts) == 1.0

    # The comparison sees everything that a draft may be off by.
    faults = ["wrong_layer", "wrong_position", "wrong_masks"]
    faults += ["wrong_previous"] if engine.draft.head else []
    faults += ["wrong_uncorrected"] if engine.draft.head == "domino" else []
    for fault in faults:
        assert engine.agreement(engine.reference(reference_model, **{fault: 1}), texts, limit=25) < 0.9, fault

    if engine.draft.head == "domino":  # the class reads the setting at every step
        settings = engine.proposer.model.config.dflash_config
        settings["pure_draft_prefix_len"] = 0
        assert engine.run(coming=texts) == texts
        settings["pure_draft_prefix_len"] = engine.draft.uncorrected
        reference = engine.reference(reference_model, wrong_uncorrected=-engine.draft.uncorrected)
        assert engine.agreement(reference, texts) == 1.0


def test_sampled_decoding(engine: Engine, reference_model) -> None:
    """The verifier gets the distribution that each draft token was drawn from, or none when all are the most likely."""
    sampled = engine.run(greedy=False)
    reference = engine.reference(reference_model)
    if not engine.draft.samples_drafts:
        assert all(p.probs is None for p in engine.proposals)
        assert engine.agreement(reference, sampled) == 1.0
        return
    features = [reference.features(text) for text in sampled]
    for p in engine.proposals:
        _, logits = reference.propose(features[p.row][: p.verified], p.sampled, forced=p.tokens)
        torch.testing.assert_close(p.probs.double(), (logits / TEMPERATURE).softmax(-1), atol=1e-4, rtol=0)
        assert all(p.probs[i, token] > 0 for i, token in enumerate(p.tokens))
    assert engine.agreement(reference, sampled) < 0.5  # they were drawn
    engine.worker.sampling_self_check()


def test_an_update_reaches_every_part_of_the_head(engine: Engine, texts: list[list[int]], reference_model) -> None:
    derived = engine.proposer.model.model
    addresses = {name: value.data_ptr() for name, value in vars(derived).items() if isinstance(value, Tensor)}
    assert len(addresses) >= 4

    old = engine.reference(reference_model)
    engine.update(make_weights(engine.draft, engine.policy, seed=2))
    assert engine.run(coming=texts) == texts  # the policy is the same
    assert engine.agreement(engine.reference(reference_model), texts) == 1.0
    assert engine.agreement(old, texts, limit=25) < 0.5

    # The embedding and the head that the draft shares are the policy's newest.
    policy = counting.perturbed(engine.policy, seed=3)
    moved = copy.deepcopy(reference_model)
    moved.load_state_dict(policy)
    engine.update(engine.weights, policy)
    others = engine.run()
    assert others != texts
    assert engine.run(coming=others) == others
    assert policy_choices(moved, others[0])[len(texts[0]) - 21 : -1] == others[0][len(texts[0]) - 20 :]
    assert engine.agreement(engine.reference(moved), others) == 1.0

    # Captured CUDA graphs read derived tensors where they were at first.
    assert addresses == {name: getattr(derived, name).data_ptr() for name in addresses}


def test_a_part_that_no_update_reaches_is_an_error(engine: Engine) -> None:
    worker = engine.worker._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    draft = worker.weight_transfer_engine._draft
    for name in engine.weights:
        trained = tuple(other for other in draft.trained if other != name)
        forgotten = dataclasses.replace(draft, trained=trained)
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
            continue  # part of a fused parameter that other names reach
        shared = {"embed_tokens.weight", "lm_head.weight"} - engine.weights.keys()
        with pytest.raises(ConfigError, match="no update would reach"):
            weight_transfer._check_coverage(forgotten, shared=shared, kept=set())


def test_float32_parts_stay_float32_in_a_bfloat16_engine(model_dirs: tuple[Path, Path], tmp_path: Path) -> None:
    draft = DRAFTS["markov-anchor"]
    policy = {name: t.bfloat16() for name, t in load_file(str(model_dirs[0] / "model.safetensors")).items()}
    weights = {
        name: t if name.startswith("confidence_head.") else t.bfloat16()
        for name, t in make_weights(draft, policy, seed=1).items()
    }
    worker = make_worker(
        model_dirs[0],
        generation_config(max_new_tokens=4, vllm_cfg=VllmConfig(precision="bfloat16", max_model_len=MAX_LEN)),
    )
    worker.build(
        speculative_config=write_draft(draft, tmp_path / "draft", model_dirs[0], weights),
        trained_draft_tensors=tuple(weights),
        draft_extension=f"{SERVING}.dspark:install",
    )
    new = {name: (1.25 * t.float() + 1e-4).to(t.dtype) for name, t in weights.items()}
    report = worker.update_weights(counting.make_payload(0, policy, new))
    assert report.num_checked == len(policy) + len(new)
    held = ModelTensors(model_runner(worker).drafter.model)
    for name in ("confidence_head.proj.weight", "confidence_head.proj.bias"):
        assert held.read(name).dtype == torch.float32
        assert torch.equal(held.read(name), new[name])
    worker.generate(DATA)
    release_beside_another(worker._llm)


def test_installing_again_changes_nothing_and_earlier_engines_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_model_runner, "DFlashProposer", DFlashProposer)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    for extension in ("dspark:install", "domino:install"):
        install_draft_extension(f"{SERVING}.{extension}")
    names = {"DFlashQwen3DSparkModel", "DominoDraftModel", "DFlashDominoDraftModel"}
    assert names <= ModelRegistry.models.keys()
    registered = {name: ModelRegistry.models[name] for name in names}
    proposer: Any = gpu_model_runner.DFlashProposer
    assert issubclass(proposer, DFlashProposer)
    assert proposer is not DFlashProposer
    for extension in ("dspark:install", "domino:install"):
        install_draft_extension(f"{SERVING}.{extension}")
    assert gpu_model_runner.DFlashProposer is proposer
    assert all(ModelRegistry.models[name] is entry for name, entry in registered.items())
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    # The runner of an engine that was built before asks whether its proposer is one of this name.
    earlier = object.__new__(DFlashProposer)
    assert isinstance(earlier, proposer)
    assert not isinstance(object(), proposer)
    assert isinstance(object.__new__(proposer), DFlashProposer)


def test_every_process_of_an_engine_installs_before_it_builds_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []

    class Worker:  # as vLLM's, which builds the model runner some time after this
        def __init__(self, vllm_config: Any, **kwargs: Any) -> None:
            events.append(kwargs)

    monkeypatch.setattr(engine_worker, "install_draft_extension", events.append)
    cls = type("EngineWorker", (engine_worker.RefitWorkerMixin, Worker), {})
    for path in ("module:function", None):
        cls(vllm_config=SimpleNamespace(additional_config={"nemo_rl": {"draft_extension": path}}), rank=1)
    assert events == ["module:function", {"rank": 1}, None, {"rank": 1}]
