"""The driver's side with two engines in Ray actors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.ray_runtime import init_ray, shutdown_ray
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.errors import ConfigError, RefitError
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.utils.config import build_master_config
from nemo_rl.weight_sync.synchronizer import WeightSynchronizer
from tests.unit.models.generation.vllm import counting_models as counting
from tests.unit.models.generation.vllm.conftest import MAX_LEN, prompts

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]


def _config(policy_dir: Path, **vllm_kwargs: object):
    return build_master_config(
        {
            "policy": {
                "model_name": str(policy_dir),
                "precision": "float32",
                "max_total_sequence_length": MAX_LEN,
                "generation": {"max_new_tokens": 12, "num_engines": 2, "vllm_kwargs": vllm_kwargs},
            },
            "cluster": {"device": "cpu", "object_store_memory": 128 * 2**20},
        }
    )


@dataclasses.dataclass
class Trainer:
    """The policy's side of a refit: puts the weights into the object store."""

    policy: counting.Weights
    draft: counting.Weights

    def weights_ref(self, version: int, *, draft_only: bool = False):
        payload = counting.make_payload(version, self.policy, self.draft)
        return dataclasses.replace(payload, tensors=ray.put(payload.tensors))


@dataclasses.dataclass
class Running:
    generation: VllmGeneration
    trainer: Trainer
    sync: WeightSynchronizer


@pytest.fixture(scope="module")
def running(model_dirs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    from safetensors.torch import load_file

    policy_dir, draft_dir = model_dirs
    config = _config(policy_dir)
    init_ray(config.cluster, log_dir=tmp_path_factory.mktemp("run"))
    cluster = RayVirtualCluster([2], use_gpus=False, num_gpus_per_node=0, name="test")
    generation = VllmGeneration(cluster, config, model_dir=str(policy_dir), device="cpu")
    generation.preload()
    draft = counting.write_counting_draft(draft_dir.parent / "counting_draft_2", policy_dir)
    generation.build(speculative_config=counting.speculative_config(draft_dir), trained_draft_tensors=tuple(draft))
    trainer = Trainer(load_file(str(policy_dir / "model.safetensors")), draft)
    sync = WeightSynchronizer(trainer, generation)
    assert sync.sync(0).verified
    yield Running(generation, trainer, sync)
    generation.shutdown()
    generation.shutdown()
    cluster.shutdown()
    shutdown_ray()


def test_rows_keep_their_order_and_do_not_depend_on_the_engine(running: Running) -> None:
    data = prompts(7, seed=1)
    out = running.generation.generate(data)
    assert out["weight_versions"].tolist() == [running.sync.version] * 7
    for row, length in enumerate(data["input_lengths"].tolist()):
        assert torch.equal(out["output_ids"][row, :length], data["input_ids"][row, :length])
    reversed_out = running.generation.generate(data.select_indices(range(6, -1, -1)))
    for row in range(7):
        end = int(out["unpadded_sequence_lengths"][row])
        assert torch.equal(reversed_out["output_ids"][6 - row, :end], out["output_ids"][row, :end])


def test_fewer_rows_than_engines(running: Running) -> None:
    assert running.generation.generate(prompts(1, seed=2)).size == 1


def test_counters_are_summed_over_engines(running: Running) -> None:
    data = prompts(4, seed=3)
    halves = [data.slice(0, 2), data.slice(2, 4)]
    start = running.generation.spec_counters()
    running.generation.generate(data, greedy=True)
    together = running.generation.spec_counters() - start
    start = running.generation.spec_counters()
    for half in halves:
        running.generation.generate(half, greedy=True)
    assert running.generation.spec_counters() - start == together
    assert together.num_drafts > 0


def test_a_refused_update_leaves_both_engines_on_the_old_version(running: Running) -> None:
    data = prompts(4, seed=4)
    before = running.generation.generate(data)["output_ids"]
    bad = dict(running.trainer.draft)
    bad["fc.weight"] = torch.full_like(bad["fc.weight"], float("nan"))
    sync = WeightSynchronizer(Trainer(counting.perturbed(running.trainer.policy, seed=1), bad), running.generation)
    with pytest.raises(RefitError, match=r"not finite: draft\.fc\.weight\. No weight was changed"):
        sync.sync(running.sync.version + 1)
    assert torch.equal(running.generation.generate(data)["output_ids"], before)
    report = running.sync.sync(running.sync.version + 1)
    assert report.verified
    assert report.num_tensors == report.num_checked == len(running.trainer.policy) + len(running.trainer.draft)
    assert set(running.generation.generate(data)["weight_versions"].tolist()) == {report.version}


def test_both_engines_change_together(running: Running) -> None:
    row = prompts(1, seed=5)
    data = BatchedDataDict.from_batches([row, row])  # one copy for each engine
    old = running.trainer.policy
    running.trainer.policy = counting.perturbed(old, seed=9, scale=0.3)
    before = running.generation.generate(data)["output_ids"]
    running.sync.sync(running.sync.version + 1)
    after = running.generation.generate(data)["output_ids"]
    assert torch.equal(after[0], after[1])
    assert not torch.equal(after[0], before[0])
    running.trainer.policy = old
    running.sync.sync(running.sync.version + 1)


def test_checks_and_probe(running: Running) -> None:
    report = running.generation.sampling_self_check()
    assert abs(report.z) < 6
    payload = running.trainer.weights_ref(running.sync.version)
    result = running.generation.measure_throughput(prompts(4, seed=6), payload=payload, batch_size=2, repeats=1)
    assert min(result.plain, result.speculative) > 0
    running.generation.prepare_for_generation()
    running.generation.finish_generation()


def test_an_engine_argument_that_is_not_the_users_stops_before_any_process(model_dirs: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match=r"vllm_kwargs\.max_model_len"):
        VllmGeneration(None, _config(model_dirs[0], max_model_len=12), model_dir="m", device="cpu")
