"""Forward and backward of the draft loss against nemo_automodel's trainer module: same weights, same loss.

    .venv/bin/python tools/bench/draft_loss.py
    .venv/bin/python tools/bench/draft_loss.py --hidden 512 --vocab 16384 --lengths 512 --batch 4

Both sides get the same policy features and logits and compute the same loss (nemo_automodel's mask rule, `input`),
which is checked before anything is timed. Each side runs in a process of its own, so that peak memory is its own too:
peak resident memory of a step minus the resident memory with inputs and weights in place. Times are medians; the sides
take turns. With `--mask-rule contiguous` ours supervises what the engine can use (the default in training).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

if TYPE_CHECKING:
    import torch
    from torch import nn


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument(
        "--lengths", type=int, default=256, help="longest sample; the others are spread down to a third"
    )
    parser.add_argument("--prompt", type=float, default=0.3, help="share of each sample that is prompt")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--depths", type=int, default=7)
    parser.add_argument("--mask-rule", choices=["input", "contiguous"], default="input")
    parser.add_argument("--repeats", type=int, default=3, help="timed iterations per turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--side", choices=["ours", "automodel"], help=argparse.SUPPRESS)
    return parser.parse_args()


def make_data(args: argparse.Namespace) -> SimpleNamespace:
    """Policy features, logits and masks from a fixed seed; the same in every process."""
    import torch

    g = torch.Generator().manual_seed(0)
    batch, width, hidden = args.batch, args.lengths, args.hidden
    lengths = torch.linspace(width / 3, width, batch).round().long()
    is_token = torch.arange(width)[None] < lengths[:, None]
    mask = is_token & (torch.arange(width)[None] >= (lengths * args.prompt).long()[:, None])
    return SimpleNamespace(
        ids=torch.randint(0, args.vocab, (batch, width), generator=g) * is_token,
        lengths=lengths,
        mask=mask,
        states=[torch.randn(batch, width, hidden, generator=g) for _ in range(3)],
        logits=torch.randn(batch, width, args.vocab, generator=g) * 2,
        embedding=torch.randn(args.vocab, hidden, generator=g) * 0.02,
    )


def initial_weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """The same weights on both sides, by name."""
    import torch

    g = torch.Generator().manual_seed(1)
    return {
        name: torch.rand(shape, generator=g) + 0.5 if len(shape) == 1 else torch.randn(shape, generator=g) * 0.05
        for name, shape in sorted(shapes.items())
    }


def build_ours(args: argparse.Namespace, data: SimpleNamespace) -> tuple[Callable[[], float], nn.Module]:
    """One step of our runtime, and its module."""
    import torch
    from torch import nn

    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.automodel.data import Microbatch
    from nemo_rl.models.automodel.draft.config import Eagle3DraftConfig
    from nemo_rl.models.automodel.draft.registry import build_draft_runtime, resolve_spec

    class Layer(nn.Module):
        def __init__(self, state: torch.Tensor) -> None:
            super().__init__()
            self.state = state

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.state

    class Trunk(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(args.vocab, args.hidden, _weight=data.embedding.clone())
            self.layers = nn.ModuleList(Layer(s) for s in (*data.states, data.states[0]))
            self.norm = nn.LayerNorm(args.hidden, bias=False)

    class Policy(nn.Module):
        """Hands out the recorded states, so that only the draft is measured."""

        def __init__(self) -> None:
            super().__init__()
            self.model = Trunk()
            self.lm_head = nn.Linear(args.hidden, args.vocab, bias=False)

        def get_input_embeddings(self) -> nn.Module:
            return self.model.embed_tokens

        def get_output_embeddings(self) -> nn.Module:
            return self.lm_head

        def forward(self) -> None:
            for layer in self.model.layers:
                layer(None)

    policy = Policy()
    cfg = Eagle3DraftConfig(enabled=True, ttt_steps=args.depths, mask_rule=args.mask_rule, aux_layer_indices=(0, 1, 2))
    spec = resolve_spec(cfg, policy_config=policy_config(args), k=3, max_model_len=args.lengths, dtype="float32")
    runtime = build_draft_runtime(
        cfg, spec, policy_model=policy, device="cpu", dtype=torch.float32, draft_dir=None, seed=0
    )
    module = runtime.module
    module.load_state_dict(initial_weights({n: tuple(p.shape) for n, p in module.named_parameters()}))
    batch, width = data.ids.shape
    is_token = torch.arange(width)[None] < data.lengths[:, None]
    samples = BatchedDataDict(
        {
            "input_ids": data.ids,
            "input_lengths": data.lengths,
            "token_mask": data.mask,
            "sample_mask": torch.ones(batch),
            "sample_index": torch.arange(batch),
        }
    )
    micro = Microbatch(
        input_ids=data.ids,
        position_ids=torch.arange(width)[None].expand(batch, -1).contiguous(),
        doc_ids=torch.where(is_token, torch.arange(batch)[:, None], -1),
        sampled_mask=data.mask,
        sample_index=torch.arange(batch),
        data=samples,
    )

    def step() -> float:
        module.zero_grad(set_to_none=True)
        runtime.begin_global_batch(samples, step=0, dp_group=None, policy_model=policy)
        with runtime.capture(policy):
            policy()
        out = runtime.loss(micro, data.logits)
        out.loss.backward()
        return float(out.loss.detach())

    return step, module


def build_automodel(args: argparse.Namespace, data: SimpleNamespace) -> tuple[Callable[[], float], nn.Module]:
    """One step of nemo_automodel's trainer module, and its draft."""
    import torch
    from nemo_automodel.components.speculative.eagle.core import Eagle3TrainerModule
    from nemo_automodel.components.speculative.eagle.draft_llama import LlamaEagle3DraftModel
    from transformers import LlamaConfig

    config = LlamaConfig(**{k: v for k, v in policy_config(args).items() if k != "model_type"}, attention_bias=False)
    config.num_hidden_layers = 1
    config.draft_vocab_size, config.target_hidden_size, config.num_aux_hidden_states = args.vocab, args.hidden, 3
    config._attn_implementation = "eager"  # the only one that its unrolled attention has on CPU
    draft = LlamaEagle3DraftModel(config).float()
    params = {n: p for n, p in draft.named_parameters() if "embed_tokens" not in n}
    weights = initial_weights({n.removeprefix("model."): tuple(p.shape) for n, p in params.items()})
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(weights[name.removeprefix("model.")])
        draft.model.embed_tokens.weight.copy_(data.embedding)
    draft.freeze_embeddings()
    trainer = Eagle3TrainerModule(
        draft,
        selected_token_ids=torch.arange(args.vocab),
        selected_token_mask=torch.ones(args.vocab, dtype=torch.bool),
        ttt_steps=args.depths,
    )
    shift = lambda x: torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1)  # noqa: E731
    attention = (torch.arange(data.ids.shape[1])[None] < data.lengths[:, None]).long()

    def step() -> float:
        draft.zero_grad(set_to_none=True)
        out = trainer(
            input_ids=shift(data.ids),
            attention_mask=attention,
            loss_mask=shift(data.mask).long(),
            aux_hidden_states=torch.cat(data.states, -1),
            target_logits=shift(data.logits),
        )
        out.loss.backward()
        return float(out.loss.detach())

    return step, draft


def policy_config(args: argparse.Namespace) -> dict[str, Any]:
    """The config.json of the policy that both sides draft for."""
    return {
        "model_type": "qwen3",
        "num_hidden_layers": 4,
        "hidden_size": args.hidden,
        "intermediate_size": 3 * args.hidden,
        "num_attention_heads": args.hidden // 32,
        "num_key_value_heads": max(1, args.hidden // 64),
        "head_dim": 32,
        "vocab_size": args.vocab,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": max(512, args.lengths),
        "rope_theta": 10000.0,
    }


class PeakMemory:
    """Peak resident memory of this process while the block runs, minus the memory at its start; in MiB."""

    def __enter__(self) -> PeakMemory:
        self._start = self._peak = self._resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self.mib = (max(self._peak, self._resident()) - self._start) / 2**20

    @staticmethod
    def _resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self._peak = max(self._peak, self._resident())


def measure(args: argparse.Namespace) -> None:
    """One side: on each line of standard input, time some iterations and print the result."""
    import torch

    torch.set_num_threads(args.threads)
    data = make_data(args)
    step, module = (build_ours if args.side == "ours" else build_automodel)(args, data)
    with PeakMemory() as memory:
        loss = step()
    norm = sum(float(p.grad.double().square().sum()) for p in module.parameters() if p.grad is not None) ** 0.5
    print(json.dumps({"loss": loss, "grad_norm": norm, "mib": memory.mib}), flush=True)
    for _ in sys.stdin:
        times = []
        for _ in range(args.repeats):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        print(json.dumps(times), flush=True)


class Side(NamedTuple):
    """One side's process: a line written to `turns` asks for one line of `answers`."""

    process: subprocess.Popen[str]
    turns: IO[str]
    answers: IO[str]


def start_side(name: str) -> Side:
    """Start a side; its first answer comes unasked."""
    process = subprocess.Popen(
        [sys.executable, __file__, *sys.argv[1:], "--side", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None, "a pipe was asked for"
    assert process.stdout is not None, "a pipe was asked for"
    return Side(process, process.stdin, process.stdout)


def main() -> None:
    """Compare the two sides."""
    args = parse()
    if args.side:
        measure(args)
        return
    sides = {name: start_side(name) for name in ("automodel", "ours")}
    first = {name: json.loads(side.answers.readline()) for name, side in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.turns):
        for name, side in sides.items():
            side.turns.write("\n")
            side.turns.flush()
            times[name] += json.loads(side.answers.readline())
    for side in sides.values():
        side.turns.close()
        side.process.wait()
    print(
        f"batch {args.batch}, lengths {round(args.lengths / 3)}..{args.lengths}, hidden {args.hidden}, vocabulary "
        f"{args.vocab}, {args.depths} depths, mask rule {args.mask_rule}, {args.threads} thread(s)"
    )
    for side, values in first.items():
        print(
            f"{side:10} loss {values['loss']:.6f}  grad norm {values['grad_norm']:.6f}  "
            f"{statistics.median(times[side]):7.3f} s  peak {values['mib']:8.1f} MiB"
        )
    same = abs(first["ours"]["loss"] / first["automodel"]["loss"] - 1) < 1e-4
    if args.mask_rule == "input" and not same:
        sys.exit("the two sides do not compute the same loss: nothing was compared")
    print(
        "ratio (automodel / ours): "
        f"time {statistics.median(times['automodel']) / statistics.median(times['ours']):.2f}x, "
        f"memory {first['automodel']['mib'] / first['ours']['mib']:.2f}x"
    )


if __name__ == "__main__":
    main()
