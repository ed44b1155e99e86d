"""Saves of a real policy with its draft, killed in each phase; test_killed_saves.py runs it in an own interpreter.

One process imports and builds everything, then forks per save; a child joins a process group of one rank, continues
from what is on disk, checks it, and saves the next step until it is killed.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_rl.algorithms.config import CheckpointingConfig
from nemo_rl.distributed.rendezvous import create_store, init_process_group
from nemo_rl.errors import CheckpointError
from nemo_rl.models.automodel import checkpoint
from nemo_rl.models.automodel.draft import checkpoint as draft_checkpoint
from nemo_rl.models.automodel.draft.metadata import optimizer_layout
from nemo_rl.models.automodel.draft.registry import build_draft_runtime, resolve_spec
from nemo_rl.models.automodel.setup import OptimizerGroup, build_optimizer_group
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.config import build_master_config
from tests.tiny_models import write_tiny_policy

HOST = "127.0.0.1"
DRAFT = {
    "enabled": True,
    "algo": "eagle3",
    "aux_layer_indices": [0],
    "ttt_steps": 3,
    "export_layouts": ["native", "speculators"],
}
SHARD_BYTES = 150_000

PHASES = {
    "the directory": ("os.mkdir", r"tmp_step_\d+"),
    "training info": ("write", r"training_info\.json"),
    "configuration": ("write", r"config\.yaml"),
    "weights": ("write", r"policy/weights/.*\.distcp"),
    "index of the weights": ("write", r"policy/weights/\.metadata.*"),
    "index complete": ("os.rename", r"policy/weights/\.metadata.*"),
    "state": ("write", r"policy/state\.json"),
    "draft": ("os.mkdir", "draft"),
    "draft config": ("os.rename", r"draft/config\.json\.partial"),
    "draft weights": ("os.rename", r"draft/model-00001-of-0000\d\.safetensors\.partial"),
    "draft weights, second": ("os.rename", r"draft/model-00002-of-0000\d\.safetensors\.partial"),
    "draft index": ("os.rename", r"draft/model\.safetensors\.index\.json\.partial"),
    "draft metadata": ("write", r"draft/draft_meta\.json\.partial"),
    "draft metadata complete": ("os.rename", r"draft/draft_meta\.json\.partial"),
    "second layout": ("os.rename", r"draft_speculators/draft_meta\.json\.partial"),
    "data loader": ("write", r"train_dataloader\.json"),
    "manifest": ("write", r"manifest\.json"),
    "rename": ("os.rename", r"tmp_step_\d+"),
    "retire": ("os.rename", r"step_\d+"),
    "removal": ("shutil.rmtree", r"tmp_delete_\d+"),
    "removal, further on": ("os.rmdir", ".*"),
}
"""What is about to happen when the process is killed, in the order of a save: event, and file below the new step."""
FIRST_AFTER_RENAME = "retire"


class Run:
    """A tiny policy, its draft, and an optimizer for each."""

    def __init__(self, directory: Path) -> None:
        model_dir = str(write_tiny_policy(directory / "policy", layers=2, intermediate=64))
        speculation = {"vllm_kwargs": {"speculative_config": {"num_speculative_tokens": 3}}}
        policy = {"model_name": model_dir, "draft": DRAFT, "generation": speculation}
        self.config = build_master_config({"cluster": {"device": "cpu"}, "policy": policy})
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        cfg, policy_config = self.config.policy.draft, self.model.config.to_dict()
        spec = resolve_spec(cfg, policy_config=policy_config, k=3, max_model_len=32, dtype="float32")
        self.draft = build_draft_runtime(
            cfg, spec, policy_model=self.model, device="cpu", dtype="float32", draft_dir=None, seed=0
        )
        modules = {"policy": self.model, "draft": self.draft.module}
        self.groups = [self._group(name, module) for name, module in modules.items()]
        self.layout = optimizer_layout(self.config.policy, spec)

    def _group(self, name: str, module: torch.nn.Module) -> OptimizerGroup:
        group = build_optimizer_group(
            name, module, optimizer="torch.optim.AdamW", kwargs={"lr": 0.1}, schedule=None, max_grad_norm=None
        )
        for p in module.parameters():  # the state that the first step makes
            zeros = {"exp_avg": torch.zeros_like(p).detach(), "exp_avg_sq": torch.zeros_like(p).detach()}
            group.optimizer.state[p] = {"step": torch.tensor(0.0), **zeros}
        return group

    def load(self, path: Path) -> None:
        checkpoint.load(path, model=self.model, groups=self.groups, draft=self.draft, draft_optimizer=self.layout)

    def save(self, path: Path) -> None:
        checkpoint.save(
            path,
            model=self.model,
            groups=self.groups,
            draft=self.draft,
            draft_layouts=self.config.policy.draft.export_layouts,
            draft_optimizer=self.layout,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a checkpoint holds of policy, draft and optimizers."""
        found: dict[str, Tensor] = {}
        for group in self.groups:
            for name, p in group.module.named_parameters():
                found[f"{group.name}.{name}"] = p.detach()
                found |= {f"{group.name}.{name}.{key}": t for key, t in group.optimizer.state[p].items()}
        assert any(name.startswith("draft.") for name in found)
        return found


def kill_and_damage(directory: Path) -> None:
    """Kill a save in every phase; then damage every kind of file."""
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # what a killed process has written is in the page cache
    draft_checkpoint.save_draft.__kwdefaults__["max_shard_bytes"] = SHARD_BYTES
    run = Run(directory)
    root = directory / "checkpoints"
    gc.freeze()

    def step(expected: int | None, kill: str | None) -> bool:
        return forked(lambda: continue_and_save(root, run, expected=expected, kill=kill))

    assert not step(None, None), "the first save is not killed"
    newest = 1
    for name in PHASES:
        assert step(newest, name), f"the save was not killed before: {name}"
        if list(PHASES).index(name) >= list(PHASES).index(FIRST_AFTER_RENAME):
            newest += 1
    assert not step(newest, None)
    check_damage(root, root / f"step_{newest + 1}")


def forked(action: Callable[[], None]) -> bool:
    """Run an action in a child; True when it was killed, False when it ended well."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        except BaseException:  # noqa: BLE001 - the child must not go on as the parent
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed"
    return os.WIFSIGNALED(status)


def continue_and_save(root: Path, run: Run, *, expected: int | None, kill: str | None) -> None:
    """Find, verify and load the newest checkpoint, compare every tensor, save the next one."""
    manager = CheckpointManager(
        CheckpointingConfig(checkpoint_dir=str(root), metric_name=None, keep_top_k=1, save_period=1)
    )
    point = manager.find_resume_point(algorithm="grpo")
    assert (None if point is None else point.step) == expected, f"found {point}, expected step {expected}"
    assert all(re.fullmatch(r"step_\d+", path.name) for path in root.iterdir())
    store = create_store(0, 1, HOST, 0)
    init_process_group("gloo", 0, 1, HOST, store.port)
    step = 1
    if point is not None:
        run.load(point.path)
        own = run.tensors()
        for name, value in content(own, point.step).items():
            assert torch.equal(own[name], value), f"{name} is not that of step {point.step}"
        step = point.step + 1
    own = run.tensors()
    for name, value in content(own, step).items():
        own[name].copy_(value)
    if kill is not None:
        kill_before(root, *PHASES[kill])
    info = {"algorithm": "grpo", "consumed_samples": step, "total_valid_tokens": 1}
    path = manager.init_tmp_checkpoint(step, info, run.config)
    run.save(path)
    manager.save_json(path / "train_dataloader.json", {"position": step})
    manager.finalize_checkpoint(path)


def content(like: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    """What the tensors hold at a step."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.rand(t.shape, generator=generator) for name, t in like.items()}


def kill_before(root: Path, event: str, pattern: str) -> None:
    """End this process before the first operation of a kind on a file below the step that is being saved."""
    below = re.compile(rf"(?:{re.escape(str(root))}/)(?:tmp_step_\d+/)?(?:{pattern})")

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "open":
            mode, flags = arguments[1], arguments[2]
            is_write = ("w" in mode) if isinstance(mode, str) else bool(flags & (os.O_WRONLY | os.O_RDWR))
            name = "write" if is_write else "read"
        if name == event and (event == "os.rmdir" or below.fullmatch(os.fspath(arguments[0]))):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


KINDS = (
    "policy/weights/*.distcp",
    "policy/weights/.metadata",
    "policy/state.json",
    "draft/config.json",
    "draft/model-00002*",
    "draft/*.index.json",
    "draft/draft_meta.json",
    "draft_speculators/config.json",
    "train_dataloader.json",
    "config.yaml",
)


def check_damage(root: Path, step: Path) -> None:
    """A flipped byte in each kind of file is found when the checkpoint is looked for, and so is another draft."""

    def find(**kwargs: Any) -> Any:
        return CheckpointManager(CheckpointingConfig(checkpoint_dir=str(root))).find_resume_point(**kwargs)

    for kind in KINDS:
        file = next(step.glob(kind))
        whole = file.read_bytes()
        for at in (0, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
            with pytest.raises(CheckpointError, match=re.escape(str(file))):
                find()
        file.write_bytes(whole)
    assert find().path == step
    # As a whole and by itself, but not the one that was saved with this policy.
    shutil.rmtree(step / "draft")
    shutil.copytree(step / "draft_speculators", step / "draft")
    with pytest.raises(CheckpointError, match="/draft/"):
        find()
    shutil.rmtree(step / "draft")
    with pytest.raises(CheckpointError, match=r"/draft/.* is missing"):
        find()
    assert find(with_draft=False).path == step, "a run that starts its draft anew does not look at the old one"


if __name__ == "__main__":
    kill_and_damage(Path(sys.argv[1]))
