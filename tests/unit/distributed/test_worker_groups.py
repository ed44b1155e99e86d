from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from nemo_rl.distributed import worker_groups
from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.errors import ConfigError, RefitError, WorkerError

pytestmark = pytest.mark.usefixtures("cluster_runtime")


@pytest.fixture(scope="module")
def cluster(cluster_runtime: object) -> Iterator[RayVirtualCluster]:
    cluster = RayVirtualCluster([2, 2], use_gpus=False, num_gpus_per_node=0, name="test")
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def echo(cluster: RayVirtualCluster) -> Iterator[RayWorkerGroup]:
    group = RayWorkerGroup(
        cluster,
        RayWorkerBuilder("cluster_workers:EchoWorker", "tag"),
        env_vars=[{"ONLY": f"rank {rank}"} for rank in range(4)],
        name_prefix="echo",
        sharding=NamedSharding.from_sizes(dp=2, tp=2),
    )
    yield group
    group.shutdown()


def new_group(
    cluster: RayVirtualCluster, name: str, *args: object, workers: int = 2, **kwargs: object
) -> RayWorkerGroup:
    return RayWorkerGroup(
        cluster, RayWorkerBuilder(f"cluster_workers:{name}", *args, **kwargs), num_workers=workers, name_prefix="short"
    )


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def test_each_rank_gets_its_own_environment(echo: RayWorkerGroup) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "ONLY", "MASTER_PORT"]
    envs = echo.get_all_worker_results(echo.run_all_workers_single_data("env", names))
    assert envs == [
        {
            "RANK": str(rank),
            "WORLD_SIZE": "4",
            "LOCAL_RANK": str(rank % 2),
            "NODE_RANK": str(rank // 2),
            "MASTER_ADDR": "127.0.0.1",
            "ONLY": f"rank {rank}",
            "MASTER_PORT": None,
        }
        for rank in range(4)
    ]


def test_results_come_in_rank_order_whoever_finishes_first(echo: RayWorkerGroup) -> None:
    refs = echo.run_all_workers_single_data("echo", "x", delay_by_rank=0.05)
    assert echo.get_all_worker_results(refs) == [(rank, "tag", "x") for rank in range(4)]


def test_multiple_data_gives_each_rank_its_own(echo: RayWorkerGroup) -> None:
    refs = echo.run_all_workers_multiple_data("echo", [{"value": [rank]} for rank in range(4)])
    assert echo.get_all_worker_results(refs) == [(rank, "tag", [rank]) for rank in range(4)]
    with pytest.raises(ValueError, match="arguments for 1 of 4 workers"):
        echo.run_all_workers_multiple_data("echo", [{}])


def test_one_rank_and_object_references(echo: RayWorkerGroup) -> None:
    reference = ray.put({"weights": list(range(1000))})
    assert echo.get_all_worker_results(echo.run_rank(2, "echo", reference)) == [
        (2, "tag", {"weights": list(range(1000))})
    ]
    with pytest.raises(ValueError, match="got rank 4; ranks are 0 to 3"):
        echo.run_rank(4, "echo")


def test_sharded_dispatch_over_two_axes(echo: RayWorkerGroup) -> None:
    def values(**options: object) -> list[tuple[int, object]]:
        refs = echo.run_all_workers_sharded_data("echo", **options)
        return [(rank, value) for rank, _, value in echo.get_all_worker_results(refs)]

    data = [["a"], ["b"]]
    assert values(in_sharded_axes=["dp"], value=data) == [(0, ["a"]), (2, ["b"])]
    replicated = [(0, ["a"]), (1, ["a"]), (2, ["b"]), (3, ["b"])]
    assert values(in_sharded_axes=["dp"], replicate_on_axes=["tp"], value=data) == replicated
    once = values(in_sharded_axes=["dp"], replicate_on_axes=["tp"], output_is_replicated=["tp"], value=data)
    assert once == [(0, ["a"]), (2, ["b"])]
    nested = [["a0", "a1"], ["b0", "b1"]]
    assert values(in_sharded_axes=["dp", "tp"], value=nested) == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1")]
    common = values(in_sharded_axes=["tp"], replicate_on_axes=["dp"], common_kwargs={"value": 7})
    assert common == [(rank, 7) for rank in range(4)]


def test_sharded_dispatch_rejects_unknown_and_doubled_axes(echo: RayWorkerGroup) -> None:
    with pytest.raises(ValueError, match="axis: got 'pp'; must be one of dp, tp"):
        echo.run_all_workers_sharded_data("echo", in_sharded_axes=["pp"], value=[1])
    with pytest.raises(ValueError, match="cannot be both"):
        echo.run_all_workers_sharded_data("echo", in_sharded_axes=["dp"], replicate_on_axes=["dp"], value=[1, 2])
    with pytest.raises(ValueError, match="value has 1 slices; slice 1 is asked for"):
        echo.run_all_workers_sharded_data("echo", in_sharded_axes=["dp"], value=[1])


def test_exception_names_group_rank_method_and_carries_the_traceback(echo: RayWorkerGroup) -> None:
    with pytest.raises(WorkerError) as caught:
        echo.get_all_worker_results(echo.run_all_workers_single_data("fail_on", 2))
    text = str(caught.value)
    assert "worker group 'echo': rank 2 of 4 failed in fail_on: ValueError: no such token: 17" in text
    assert "cluster_workers.py" in text
    assert "_raise_deep_inside" in text
    # All other ranks had finished: the group goes on.
    assert len(echo.get_all_worker_results(echo.run_all_workers_single_data("echo"))) == 4


def test_our_own_exception_is_the_cause(echo: RayWorkerGroup) -> None:
    with pytest.raises(WorkerError, match=re.escape("RefitError: tensor lm_head.weight: missing")) as caught:
        echo.get_all_worker_results(echo.run_rank(1, "reject_refit"))
    assert isinstance(caught.value.__cause__, RefitError)


def test_failed_constructor_is_reported_by_whatever_is_collected_first(cluster: RayVirtualCluster) -> None:
    group = new_group(cluster, "EchoWorker", "engine", fail_on_rank=0, workers=1)
    with pytest.raises(WorkerError, match=r"rank 0 of 1 failed in __init__: ValueError: engine cannot be built"):
        group.wait_until_built()
    with pytest.raises(WorkerError, match=r"rank 0 of 1 failed in echo: ValueError: engine cannot be built"):
        group.get_all_worker_results(group.run_all_workers_single_data("echo"))
    group.shutdown()


def test_exception_on_one_rank_surfaces_while_others_hang(
    cluster: RayVirtualCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_groups, "FAILURE_GRACE_S", 0.5)
    group = new_group(cluster, "EchoWorker", "hanging")
    pids = group.pids()
    start = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 of 2 failed") as caught:
        group.get_all_worker_results(group.run_all_workers_single_data("fail_while_others_hang", 1))
    assert time.monotonic() - start < 5
    assert "rank 0: still in fail_while_others_hang, killed" in str(caught.value)
    assert alive(pids) == []
    with pytest.raises(WorkerError, match="rank 1 failed in fail_while_others_hang"):
        group.run_all_workers_single_data("echo")
    group.shutdown()


def test_death_names_the_rank_and_its_last_output(cluster: RayVirtualCluster) -> None:
    group = new_group(cluster, "EchoWorker", "dying", workers=1)
    with pytest.raises(WorkerError, match="rank 0 of 1 failed in die: the worker process died") as caught:
        group.get_all_worker_results(group.run_rank(0, "die"))
    assert "last words on stderr" in str(caught.value)


def test_shutdown_is_orderly_then_final(
    cluster: RayVirtualCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_groups, "CLOSE_TIMEOUT_S", 2.0)
    orderly = new_group(cluster, "ClosingWorker", str(tmp_path), workers=1)
    hanging = new_group(cluster, "ClosingWorker", str(tmp_path / "never"), hang=True, workers=1)
    pids = orderly.pids() + hanging.pids()
    orderly.shutdown()
    hanging.shutdown()
    orderly.shutdown()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["closed-0"]
    assert alive(pids) == []
    with pytest.raises(WorkerError, match="it was shut down"):
        orderly.run_all_workers_single_data("echo")


def test_too_many_workers_are_refused(cluster: RayVirtualCluster) -> None:
    with pytest.raises(ValueError, match="5 workers of 1 slots; the cluster has 4 slots"):
        new_group(cluster, "EchoWorker", "x", workers=5)


def test_gpus_are_shared_by_colocated_groups_and_joined_by_wide_workers(cluster_runtime: object) -> None:
    cluster = RayVirtualCluster([2], use_gpus=True, num_gpus_per_node=2, max_colocated_worker_groups=2, name="gpu")

    def visible(group: RayWorkerGroup) -> list[str]:
        envs = group.get_all_worker_results(group.run_all_workers_single_data("env", ["CUDA_VISIBLE_DEVICES"]))
        return [env["CUDA_VISIBLE_DEVICES"] for env in envs]

    builder = RayWorkerBuilder("cluster_workers:EchoWorker", "gpu")
    policy = RayWorkerGroup(cluster, builder, name_prefix="policy")
    engines = RayWorkerGroup(cluster, builder, name_prefix="engines", bundles_per_worker=2)
    assert visible(policy) == ["0", "1"]
    assert visible(engines) == ["0,1"]
    with pytest.raises(ValueError, match="already hold 1"):
        RayWorkerGroup(cluster, builder, name_prefix="third")
    policy.shutdown()
    engines.shutdown()
    cluster.shutdown()


def test_more_gpu_workers_than_gpus_are_refused(cluster_runtime: object) -> None:
    with pytest.raises(ConfigError, match=r"cluster.gpus_per_node: got 2; 3 workers"):
        RayVirtualCluster([3], use_gpus=True, num_gpus_per_node=2, name="wide")
    with pytest.raises(ConfigError, match=r"4 GPU workers are asked for; the Ray cluster has 2 GPUs"):
        RayVirtualCluster([2, 2], use_gpus=True, num_gpus_per_node=2, name="long").get_placement_groups()
