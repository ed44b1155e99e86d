from __future__ import annotations

import errno
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl.algorithms.config import CheckpointingConfig
from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.utils import checkpoint
from nemo_rl.utils.checkpoint import CheckpointManager, ResumePoint

CONTENT = {"policy/weights/shard_0.bin": b"w" * 3000, "policy/optimizer.bin": b"o" * 70, "draft/empty.bin": b""}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def make_manager(root: Path, *, clock: Callable[[], float] = time.monotonic, **fields: Any) -> CheckpointManager:
    defaults = {"checkpoint_dir": str(root), "metric_name": None, "keep_top_k": None, "save_period": 1}
    return CheckpointManager(CheckpointingConfig(**(defaults | fields)), clock=clock)


def training_info(*, tag: str = "", **metrics: float) -> dict[str, Any]:
    return {
        "algorithm": "grpo",
        "consumed_samples": 64,
        "total_valid_tokens": 1234,
        "tag": tag,
        "val_metrics": metrics,
        "train_metrics": {f"train/{name}": value for name, value in metrics.items()},
    }


def save(manager: CheckpointManager, step: int, *, tag: str = "", **metrics: float) -> Path:
    tmp = manager.init_tmp_checkpoint(step, training_info(tag=tag, **metrics), {"grpo": {"seed": 1}})
    for name, data in CONTENT.items():
        (tmp / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp / name).write_bytes(data + tag.encode())
    manager.save_json(tmp / "train_dataloader.json", {"epoch": 0, "position": step})
    return manager.finalize_checkpoint(tmp)


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def assert_intact(point: ResumePoint | None, *, steps: set[int], tags: set[str]) -> None:
    """The resume point is one of the expected checkpoints, whole and unmixed."""
    assert point is not None
    assert point.step in steps
    tag = point.training_info["tag"]
    assert tag in tags
    for name, data in CONTENT.items():
        assert (point.path / name).read_bytes() == data + tag.encode()
    assert json.loads((point.path / "train_dataloader.json").read_text())["position"] == point.step


# ---------------------------------------------------------------- save and find


def test_a_saved_checkpoint_is_found_verified_and_read(root: Path) -> None:
    path = save(make_manager(root), 3, accuracy=0.5)
    point = make_manager(root).find_resume_point(algorithm="grpo")
    assert_intact(point, steps={3}, tags={""})
    assert point.path == path == root / "step_3"
    assert point.training_info == training_info(accuracy=0.5) | {"format_version": 1, "step": 3}
    assert yaml.safe_load((path / "config.yaml").read_text()) == {"grpo": {"seed": 1}}


def test_a_configuration_object_is_stored_as_plain_yaml(root: Path) -> None:
    manager = make_manager(root)
    config = CheckpointingConfig(save_period=7)
    tmp = manager.init_tmp_checkpoint(1, training_info(), config)
    assert yaml.safe_load((tmp / "config.yaml").read_text())["save_period"] == 7


def test_the_latest_is_by_number_not_by_name_or_time(root: Path) -> None:
    manager = make_manager(root)
    for step in (10, 9, 100, 11):
        save(manager, step)
    assert manager.get_latest_checkpoint_path() == root / "step_100"


def test_an_empty_directory_has_no_resume_point(root: Path) -> None:
    manager = make_manager(root)
    assert manager.get_latest_checkpoint_path() is None
    assert manager.get_best_checkpoint_path() is None
    assert manager.find_resume_point() is None


def test_directories_that_are_not_complete_checkpoints_are_ignored(root: Path) -> None:
    manager = make_manager(root)
    save(manager, 1)
    (root / "step_2").mkdir()
    (root / "step_2" / "training_info.json").write_text("{}")
    (root / "step_x").mkdir()
    assert make_manager(root).find_resume_point().step == 1


def test_a_missing_required_entry_is_named(root: Path) -> None:
    info = training_info()
    del info["consumed_samples"]
    with pytest.raises(ValueError, match="consumed_samples"):
        make_manager(root).init_tmp_checkpoint(1, info)


def test_only_directories_of_init_can_be_finalized(root: Path) -> None:
    with pytest.raises(ValueError, match="init_tmp_checkpoint"):
        make_manager(root).finalize_checkpoint(root / "something")


def test_saving_a_step_again_replaces_it(root: Path) -> None:
    manager = make_manager(root)
    save(manager, 2, tag="old")
    save(manager, 2, tag="new")
    assert_intact(manager.find_resume_point(), steps={2}, tags={"new"})
    assert names(root) == {"step_2"}


def test_nothing_is_touched_when_disabled(root: Path) -> None:
    manager = make_manager(root, enabled=False)
    assert not root.exists()
    assert manager.find_resume_point() is None
    assert not manager.should_save(10, is_last=True)


def test_every_file_and_directory_is_on_disk_before_the_rename(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_fsync(descriptor)

    def rename(self: Path, target: Path) -> Path:
        events.append(f"rename to {Path(target).name}")
        return real_rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    final = save(make_manager(root), 5)
    position = events.index("rename to step_5")
    tmp = root / "tmp_step_5"
    everything = {tmp, *(tmp / path.relative_to(final) for path in final.rglob("*"))}
    assert set(events[:position]) == {str(path) for path in everything}
    assert events[position + 1 :] == [str(root)]


# ---------------------------------------------------------------- retention


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        pytest.param({"metric_name": None}, {4, 5}, id="by step"),
        pytest.param({"metric_name": "val:accuracy"}, {2, 4, 5}, id="by metric, newest besides"),
        pytest.param({"metric_name": "train:accuracy", "higher_is_better": False}, {1, 3, 5}, id="lower is better"),
        pytest.param({"metric_name": "val:other"}, {4, 5}, id="metric missing"),
        pytest.param({"metric_name": "val:accuracy", "keep_top_k": None}, {1, 2, 3, 4, 5}, id="keep all"),
    ],
)
def test_the_best_and_the_newest_are_kept(root: Path, fields: dict[str, Any], kept: set[int]) -> None:
    manager = make_manager(root, **({"keep_top_k": 2} | fields))
    for step, accuracy in enumerate((0.1, 0.9, 0.2, 0.8, 0.3), start=1):
        save(manager, step, accuracy=accuracy)
    assert names(root) == {f"step_{step}" for step in kept}


def test_equal_metrics_prefer_the_newer_and_unmeasured_ones_come_last(root: Path) -> None:
    manager = make_manager(root, keep_top_k=2, metric_name="val:accuracy")
    save(manager, 1, accuracy=0.5)
    save(manager, 2, accuracy=0.5)
    save(manager, 3, accuracy=float("nan"))
    save(manager, 4)
    assert names(root) == {"step_1", "step_2", "step_4"}
    assert manager.get_best_checkpoint_path() == root / "step_2"
    assert manager.get_latest_checkpoint_path() == root / "step_4"


# ---------------------------------------------------------------- when


def test_saves_are_due_each_period_and_at_the_end(root: Path) -> None:
    manager = make_manager(root, save_period=3)
    due = [manager.should_save(step, is_last=step == 8) for step in range(1, 9)]
    assert due == [False, False, True, False, False, True, False, True]
    assert not manager.out_of_time()


def test_a_save_is_due_before_the_deadline_and_the_run_is_told_to_stop(root: Path) -> None:
    clock_seconds = [0.0]
    manager = make_manager(root, save_period=100, checkpoint_must_save_by="00:00:01:00", clock=lambda: clock_seconds[0])
    manager.start_iterations()
    due = []
    for step in range(1, 6):
        clock_seconds[0] = 13.0 * step
        due.append((manager.should_save(step), manager.out_of_time()))
    # 13 s steps, 60 s in all: after step 4 (52 s) another one would end at 65 s
    assert due == [(False, False), (False, False), (False, False), (True, True), (True, True)]


# ---------------------------------------------------------------- damage


def damage_flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def damage_truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    "name",
    [
        "policy/weights/shard_0.bin",
        "policy/optimizer.bin",
        "training_info.json",
        "config.yaml",
        "train_dataloader.json",
    ],
)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        pytest.param(damage_flip, "is corrupted: CRC-32", id="flipped bit"),
        pytest.param(damage_truncate, "truncated", id="truncated"),
        pytest.param(Path.unlink, "", id="missing"),
    ],
)
def test_a_damaged_file_is_named(root: Path, name: str, damage: Callable[[Path], None], words: str) -> None:
    manager = make_manager(root)
    save(manager, 1)
    save(manager, 2)
    damage(root / "step_2" / name)
    if damage is Path.unlink and name == "training_info.json":  # not a complete checkpoint any more
        assert manager.find_resume_point().step == 1
        return
    with pytest.raises(CheckpointError, match=re.escape(str(root / "step_2" / name)) + f".*{words}") as caught:
        manager.find_resume_point()
    assert f"Remove {root / 'step_2'} to continue from step 1." in str(caught.value)


@pytest.mark.parametrize("num_large", [1, 3], ids=["one", "several"])
def test_damage_in_large_files_is_found(root: Path, num_large: int) -> None:
    manager = make_manager(root)
    tmp = manager.init_tmp_checkpoint(1, training_info())
    for number in range(num_large):
        (tmp / f"shard_{number}.bin").write_bytes(bytes(5 << 20))
    path = manager.finalize_checkpoint(tmp)
    manager.verify(path)
    damage_flip(path / f"shard_{num_large - 1}.bin")
    with pytest.raises(CheckpointError, match=rf"shard_{num_large - 1}\.bin is corrupted"):
        manager.verify(path)


def test_a_damaged_manifest_is_named(root: Path) -> None:
    manager = make_manager(root)
    save(manager, 1)
    os.truncate(root / "step_1" / "manifest.json", 40)
    with pytest.raises(CheckpointError, match=r"step_1/manifest\.json cannot be read"):
        manager.find_resume_point()


def test_the_only_checkpoint_damaged_says_so(root: Path) -> None:
    manager = make_manager(root)
    save(manager, 1)
    damage_flip(root / "step_1" / "policy/optimizer.bin")
    with pytest.raises(CheckpointError, match="to start from the beginning"):
        manager.find_resume_point()


def test_a_checkpoint_of_another_algorithm_is_a_config_error(root: Path) -> None:
    manager = make_manager(root)
    save(manager, 1)
    with pytest.raises(ConfigError, match=r"checkpointing\.checkpoint_dir: .*a 'grpo' run; this one is 'sft'"):
        manager.find_resume_point(algorithm="sft")


def test_a_checkpoint_of_another_layout_is_a_config_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager(root)
    monkeypatch.setattr(checkpoint, "FORMAT_VERSION", 99)
    save(manager, 1)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="layout 99; must be 1"):
        manager.find_resume_point()


def test_an_unwritable_directory_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"checkpointing\.checkpoint_dir: got .*must be a directory that can be written"
    ):
        make_manager(tmp_path / "file" / "checkpoints")


def test_a_full_disk_is_a_checkpoint_error_and_keeps_the_previous(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager(root)
    save(manager, 1)

    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match=r"No space left on device.*Free space"):
        save(manager, 2)
    monkeypatch.undo()
    assert_intact(make_manager(root).find_resume_point(), steps={1}, tags={""})


# ---------------------------------------------------------------- killed at any moment
# These run in a fresh interpreter: forking is cheap and safe there, whatever the test session has imported.


@pytest.mark.parametrize(
    ("first_step", "second_step", "keep_top_k"),
    [
        pytest.param(1, 2, 1, id="next step, previous retired"),
        pytest.param(2, 2, None, id="same step again"),
    ],
)
def test_a_kill_before_any_operation_of_a_save_leaves_a_whole_checkpoint(
    tmp_path: Path, first_step: int, second_step: int, keep_top_k: int | None
) -> None:
    run_scenario(f"kill_each_operation(Path({str(tmp_path)!r}), {first_step}, {second_step}, {keep_top_k})")


def test_kills_at_random_moments_never_lose_a_finished_save(root: Path) -> None:
    root.parent.mkdir(exist_ok=True)
    run_scenario(f"kill_at_random(Path({str(root)!r}))")


def run_scenario(call: str) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from {Path(__file__).stem} import *; {call}"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def run_and_kill(root: Path, action: Callable[[], object], *, at: int) -> bool:
    """Run an action in a child process that is killed before its ``at``-th file-system operation below ``root``.

    Returns:
        True when it was killed, False when it ended before.
    """
    child = os.fork()
    if child == 0:
        seen = itertools.count(1)

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.scandir", "shutil.rmtree"):
                return
            # removals inside a directory name their files relative to its descriptor
            inside = str(arguments[0]).startswith(str(root)) or event in ("os.remove", "os.rmdir")
            if inside and next(seen) == at:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def kill_each_operation(directory: Path, first_step: int, second_step: int, keep_top_k: int | None) -> None:
    """Save a checkpoint, kill the next save before each of its operations, and continue from what is left."""
    # what a killed process has written is in the page cache; waiting for the disk is another test's subject
    os.fsync = lambda descriptor: None
    seen_tags = set()
    for at in itertools.count(1):
        root = directory / f"kill_{at}"
        save(make_manager(root, keep_top_k=keep_top_k), first_step, tag="first")

        def second_save(root: Path = root) -> None:
            save(make_manager(root, keep_top_k=keep_top_k), second_step, tag="second")

        killed = run_and_kill(root, second_save, at=at)
        # the restart may be killed too, while it clears up
        run_and_kill(root, lambda root=root: make_manager(root, keep_top_k=keep_top_k), at=3)
        manager = make_manager(root, keep_top_k=keep_top_k)
        point = manager.find_resume_point()
        assert_intact(point, steps={first_step, second_step}, tags={"first", "second"})
        assert all(re.fullmatch(r"step_\d+", name) for name in names(root)), names(root)
        for name in names(root):
            manager.verify(root / name)
        seen_tags.add(point.training_info["tag"])
        if at % 5 == 0:
            save(manager, 3, tag="third")
            assert_intact(manager.find_resume_point(), steps={3}, tags={"third"})
        shutil.rmtree(root)
        if not killed:
            break
    assert at > 20, "the kills did not reach the phases of the save"
    assert seen_tags == {"first", "second"}


def kill_at_random(root: Path) -> None:
    """Kill a process that saves one checkpoint after another, eight times, each time after one save or more."""
    delays, last = random.Random(0), 0
    finished = root.parent / "finished"
    for _ in range(8):
        child = os.fork()
        if child == 0:
            manager = make_manager(root, keep_top_k=2)
            for step in itertools.count(last + 1):
                save(manager, step, tag=f"run {step}")
                finished.with_suffix(".tmp").write_text(str(step))
                finished.with_suffix(".tmp").replace(finished)
        while not finished.exists() or int(finished.read_text()) <= last:
            time.sleep(0.001)
        time.sleep(delays.uniform(0.0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        point = make_manager(root, keep_top_k=2).find_resume_point()
        assert point.step >= int(finished.read_text())
        assert_intact(point, steps={point.step}, tags={f"run {point.step}"})
        last = point.step
