"""What each draft reads and proposes, as values; `tools/draft_timing.py` draws them.

Forwards, slots, layers and K are those of the draft that the algorithm's defaults resolve to. `WORDS` holds what no
architecture says.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nemo_rl.models.automodel.draft.architecture import BlockArchitecture, DominoArchitecture, DraftArchitecture
from nemo_rl.models.automodel.draft.registry import DRAFT_ALGORITHMS, resolve_spec
from tools.draft_table import POLICY

K = 3
LAST = 3
"""x0 .. x[LAST - 1] are verified, x[LAST] was just sampled."""
RESPONSE = 8
"""Tokens of the response that is trained on."""
ANCHORS = (0, 3, 5)
"""Places in it where a block draft's blocks start; the last one is cut by the end of the response."""


@dataclass(frozen=True)
class Words:
    """What is said of an algorithm that its architecture does not tell.

    Attributes:
        alt: one sentence, for who cannot see the picture.
        serving: line above the serving panel.
        training: line above the training panel.
        head: name of the head that fixes tokens from left to right; "" = none.
        correction: what it adds to a slot's logits; `{last}` is the token before, `{prefix}` all from the anchor on.
        trained_depths: depths that are trained when each is a forward of its own; the deeper ones are only run.
    """

    alt: str
    serving: str
    training: str
    head: str = ""
    correction: str = ""
    trained_depths: int = K


WORDS: Mapping[str, Words] = {
    "eagle1": Words(
        alt="EAGLE-1 proposes three tokens in three forwards, each of which reads the state that the one before it "
        "predicted; the policy then verifies four places in one forward.",
        serving="Each forward sees the slots before its own. Its output g' stands in for the policy's in the next one.",
        training="Depth 0 alone is trained. The deeper ones are run without gradients, for what is reported of them.",
        trained_depths=1,
    ),
    "eagle3": Words(
        alt="EAGLE-3 proposes three tokens in three forwards, each of which reads the output of the one before it; "
        "the policy then verifies four places in one forward.",
        serving="Each forward sees the slots before its own. Its output h stands in for the features in the next one.",
        training="Depth k reads the recorded token k + 1 places on and the output of depth k - 1, one after the other.",
    ),
    "peagle": Words(
        alt="P-EAGLE proposes three tokens in one forward over three slots, of which the later two read placeholders; "
        "the policy then verifies four places in one forward.",
        serving="Each slot sees the slots before its own. m is a learned feature, mask a token that never occurs.",
        training="All depths in one forward. From depth to depth some chains are dropped at random.",
    ),
    "dflash": Words(
        alt="DFlash fills a block of four slots in one forward, and the three behind the anchor propose a token each; "
        "the policy then verifies four places in one forward.",
        serving="Every slot sees the features as keys and values, and the whole block. A mask predicts what it hides.",
        training="A block behind each drawn anchor, all in one forward. A block cut by the end keeps its slots.",
    ),
    "dspark": Words(
        alt="DSpark fills a block of three slots in one forward, and its Markov head then chooses the three tokens "
        "from left to right; the policy then verifies four places in one forward.",
        serving="Every slot sees the features and the whole block. A Markov head then adds what the token before says.",
        training="All blocks in one forward. The Markov head reads recorded tokens; a second head learns acceptance.",
        head="Markov head",
        correction="M[{last}]",
    ),
    "domino": Words(
        alt="Domino fills a block of three slots in one forward, and its recurrent head then corrects the choice of "
        "all tokens but the first from left to right; the policy then verifies four places in one forward.",
        serving="Every slot sees the features and the whole block. A recurrent head then corrects all but the first.",
        training="All blocks in one forward. The recurrent head reads recorded tokens; the loss moves from b to b + c.",
        head="recurrent head",
        correction="c({prefix})",
    ),
}


@dataclass(frozen=True)
class Slot:
    """A column of a forward: what it reads, what the layers give, which token is read off that; "" = nothing."""

    feature: str
    token: str
    output: str = ""
    proposal: str = ""


@dataclass(frozen=True)
class Timing:
    """What happens between two verifications, and in a training step.

    Attributes:
        feature: letter of what the draft reads of the policy.
        layers: of the draft.
        context: columns that are only seen.
        forwards: slots of each forward of the draft.
        head: the steps of a head: lines that say what a token is chosen from, and the token.
        passes: forwards in training; each is rows of slots as `#` trained, `o` computed and not trained, `.` dropped,
            `a` anchor that predicts nothing, `A` anchor that is trained, blank for no slot.
        rows: what the rows of a pass are; a column is a place of the response.
    """

    feature: str
    layers: int
    context: tuple[Slot, ...]
    forwards: tuple[tuple[Slot, ...], ...]
    head: tuple[tuple[tuple[str, ...], str], ...]
    passes: tuple[tuple[str, ...], ...]
    rows: str


def timing(algo: str) -> Timing:
    """What the draft of an algorithm does.

    Args:
        algo: draft algorithm.
    """
    config: type[Any] = DRAFT_ALGORITHMS[algo].config
    wanted = {"mask_token_id": 151669, "ttt_steps": K, "num_depths": K}
    cfg = config(enabled=True, **{key: value for key, value in wanted.items() if key in config.model_fields})
    arch = resolve_spec(cfg, policy_config=POLICY, k=K, max_model_len=4096, dtype="bfloat16").architecture
    if isinstance(arch, BlockArchitecture):
        return _block(arch, WORDS[algo])
    if arch.placeholder_id is not None:
        return _parallel(arch, ratio=cfg.down_sample_ratio, least=cfg.down_sample_ratio_min)
    return _chained(arch, WORDS[algo])


def proposed(j: int) -> str:
    """Name of the j-th proposed token, from 1; the 0-th is the one that was sampled."""
    return f"x{LAST + j}'" if j else f"x{LAST}"


def _pairs(feature: str) -> tuple[Slot, ...]:
    """Slots of verified tokens: a feature with the token behind it."""
    return tuple(Slot(f"{feature}{i}", f"x{i + 1}") for i in range(LAST - 1))


def _chained(arch: DraftArchitecture, words: Words) -> Timing:
    """A forward per token, each of which reads the output of the one before it."""
    feature = "g" if arch.reads_final_state else "f"
    outputs = [f"g{LAST + k}'" if arch.reads_final_state else f"h{k}" for k in range(K)]
    reads = [f"{feature}{LAST - 1}", *outputs]
    forwards = tuple((Slot(reads[k], proposed(k), outputs[k], proposed(k + 1)),) for k in range(K))
    passes = tuple((("#" if k < words.trained_depths else "o") * (RESPONSE - 1 - k),) for k in range(K))
    return Timing(feature, arch.num_hidden_layers, _pairs(feature), forwards, (), passes, "depth")


def _parallel(arch: DraftArchitecture, *, ratio: float, least: float) -> Timing:
    """One forward; placeholders stand for what is not known yet."""
    first = Slot(f"f{LAST - 1}", proposed(0), proposal=proposed(1))
    slots = (first, *(Slot("m", "mask", proposal=proposed(k + 1)) for k in range(1, K)))
    charged = RESPONSE - 1
    rows, kept = ["#" * charged], list(range(charged))
    for k in range(1, K):
        # How many stay is what `sampling.cod_caps` says; which ones is random there.
        pool = [i for i in kept if i < charged - k]
        cap = min(len(pool), int((charged - k) * max(ratio**k, least)))
        kept = [pool[i * len(pool) // cap] for i in range(cap)]
        rows.append("".join("#" if i in kept else "." for i in range(charged - k)))
    return Timing("f", arch.num_hidden_layers, _pairs("f"), (slots,), (), (tuple(rows),), "depths")


def _block(arch: BlockArchitecture, words: Words) -> Timing:
    """One forward over a block; a head may then fix its tokens from left to right."""
    slots = []
    for i in range(arch.block_size):
        j = i - arch.first_slot
        output = f"b{j}" if words.head and j >= 0 else ""
        slots.append(Slot("", "mask" if i else proposed(0), output, "" if words.head or j < 0 else proposed(j + 1)))
    uncorrected = arch.pure_draft_prefix_len if isinstance(arch, DominoArchitecture) else 0
    head = []
    for j in range(arch.num_predicted if words.head else 0):
        known = [proposed(i) for i in range(j + 1)]
        added = words.correction.format(last=known[-1], prefix=", ".join(known))
        head.append(((f"b{j}",) if j < uncorrected else (f"b{j} +", added), proposed(j + 1)))
    rows = []
    for anchor in ANCHORS:
        row = " " * anchor
        for i in range(arch.block_size):
            # Slot i predicts the token 1 - first_slot places on from its own.
            is_known = anchor + i + 1 - arch.first_slot < RESPONSE
            row += "a" if i < arch.first_slot else "o" if not is_known else "#" if i else "A"
        rows.append(row)
    context = tuple(Slot(f"f{i}", "") for i in range(LAST))
    return Timing("f", arch.num_hidden_layers, context, (tuple(slots),), tuple(head), (tuple(rows),), "blocks")
