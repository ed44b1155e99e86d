"""`Policy` over real Ray workers: dispatch, folding, object store, errors, teardown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

ray = pytest.importorskip("ray")

from nemo_rl.algorithms.loss import ClippedPGLossFn  # noqa: E402  after the guard
from nemo_rl.distributed.ray_runtime import init_ray, shutdown_ray  # noqa: E402  after the guard
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster  # noqa: E402  after the guard
from nemo_rl.errors import ConfigError, WorkerError  # noqa: E402  after the guard
from nemo_rl.models.policy.lm_policy import Policy  # noqa: E402  after the guard
from nemo_rl.models.policy.sharding import policy_sharding  # noqa: E402  after the guard
from nemo_rl.weight_sync.checksum import from_numpy, tensor_checksum  # noqa: E402  after the guard
from tests.unit.models.policy.scenarios import fold, make_batch, make_config, train_steps  # noqa: E402  after the guard

pytestmark = pytest.mark.ray
NUM_WORKERS = 2


def config_of(model_dir: str, **dtensor: Any) -> Any:
    return make_config(model_dir, dtensor_cfg={"num_workers": NUM_WORKERS, **dtensor})


@pytest.fixture(scope="module")
def policy(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    config = config_of(model_dir)
    is_shared = ray.is_initialized()
    init_ray(config.cluster, log_dir=tmp_path_factory.mktemp("ray"))
    cluster = RayVirtualCluster([NUM_WORKERS], use_gpus=False, num_gpus_per_node=0, name="policy-test")
    policy = Policy(cluster, config, draft_spec=None, draft_dir=None, init_reference_model=False)
    yield policy
    policy.shutdown()
    cluster.shutdown()
    if not is_shared:
        shutdown_ray()


def test_training_through_ray_equals_one_process(policy, pools, model_dir, tmp_path):
    data = make_batch(masked=(2,))
    config = config_of(model_dir)
    single = pools[1].run(train_steps, make_config(model_dir), data)
    before = policy.get_logprobs(data)["logprobs"]
    torch.testing.assert_close(before, single[0].logprobs, rtol=1e-5, atol=1e-5)
    # An odd number of samples is padded and the padding dropped.
    odd = policy.get_logprobs(data.slice(0, 5))["logprobs"]
    torch.testing.assert_close(odd, before[:5], rtol=1e-6, atol=1e-6)

    policy.save_checkpoint(str(tmp_path))
    results = [policy.train(data, ClippedPGLossFn(config.loss_fn), step=step) for step in range(2)]
    for got, want in zip(results, fold(single), strict=True):
        assert got["draft"] is None
        assert got["num_skipped_updates"] == 0
        for key in ("loss", "grad_norm", "lr", "global_valid_toks", "global_valid_seqs"):
            assert got[key] == pytest.approx(want[key], rel=1e-5, abs=1e-6), key
        for name, pair in want["metrics"].items():
            assert got["metrics"][name] == pytest.approx(pair, rel=2e-5, abs=2e-5), name

    payload = policy.weights_ref(7)
    assert payload.version == 7
    assert payload.manifest == policy.refit_manifest()
    tensors = ray.get(payload.tensors)
    assert set(tensors) == set(single[0].state)
    for name, info in payload.manifest.wire_entries().items():
        tensor = from_numpy(tensors[name], info.dtype)
        assert tensor_checksum(tensor) == payload.checksums[name]
        torch.testing.assert_close(tensor, single[0].state[name], rtol=1e-5, atol=2e-6)

    policy.load_checkpoint(str(tmp_path))
    assert torch.equal(policy.get_logprobs(data)["logprobs"], before)


def test_wrong_batch_size_is_a_config_error(policy):
    with pytest.raises(ConfigError, match="train_global_batch_size: got 8; must divide the 7 samples"):
        policy.train(make_batch().slice(0, 7), None, step=0)


def test_a_worker_error_names_the_method(policy):
    with pytest.raises(WorkerError, match="get_reference_policy_logprobs") as info:
        policy.get_reference_policy_logprobs(make_batch())
    assert "init_reference_model" in str(info.value)
    with pytest.raises(WorkerError, match=r"policy\.draft\.enabled"):
        policy.export_draft("nowhere")
    # Both ranks raised before any collective: the group is still usable.
    assert policy.get_logprobs(make_batch())["logprobs"].shape == (8, 24)


def test_shutdown_leaves_no_process(model_dir, policy):
    pids = policy._group.pids()
    policy.shutdown()
    _, alive = psutil.wait_procs([psutil.Process(p) for p in pids if psutil.pid_exists(p)], timeout=20)
    assert not alive
    policy.shutdown()  # again is harmless


def test_layout_must_fit_the_workers(model_dir):
    config = config_of(model_dir, tensor_parallel_size=2)
    assert policy_sharding(config, num_workers=2).shape == {"dp": 1, "cp": 1, "tp": 2}
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        policy_sharding(config, num_workers=3)
