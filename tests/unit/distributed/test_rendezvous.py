from __future__ import annotations

import ipaddress
import time
from collections.abc import Iterator

import psutil
import pytest

from nemo_rl.distributed import ray_runtime
from nemo_rl.distributed.environment import worker_env
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.errors import WorkerError

torch = pytest.importorskip("torch")

from nemo_rl.distributed import collectives, rendezvous  # noqa: E402  after the guard


@pytest.fixture(scope="module")
def gloo(cluster_runtime: object) -> Iterator[RayWorkerGroup]:
    cluster = RayVirtualCluster([2], use_gpus=False, num_gpus_per_node=0, name="gloo")
    group = RayWorkerGroup(
        cluster,
        RayWorkerBuilder("cluster_workers:GlooWorker"),
        env_vars=worker_env("policy", device="cpu"),
        name_prefix="gloo",
    )
    group.init_process_groups()
    yield group
    group.shutdown()
    cluster.shutdown()


def test_two_ranks_reduce_over_a_port_that_the_system_chose(gloo: RayWorkerGroup) -> None:
    results = gloo.get_all_worker_results(gloo.run_all_workers_single_data("reduce"))
    for rank, result in enumerate(results):
        assert result["sum"] == [3.0, 30.0]
        assert result["max"] == [2.0, 20.0]
        assert result["kept"] == [rank + 1.0, 10.0 * (rank + 1)]


def is_loopback(text: str) -> bool:
    address = ipaddress.ip_address(text)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def test_nothing_listens_beyond_loopback(gloo: RayWorkerGroup, cluster_runtime: ray_runtime.RayRuntime) -> None:
    # Rank 0 holds its Ray port, the store and a gloo pair: proof that the workers' own sockets are counted.
    assert len(gloo.get_all_worker_results(gloo.run_rank(0, "listening"))[0]) >= 3
    driver = psutil.Process()
    processes = [driver, *driver.children(recursive=True)]
    names = " ".join(process.name() for process in processes)
    assert all(part in names for part in ("gcs_server", "raylet", "ray::")), names
    sockets = [
        (process.name(), c.laddr.ip, c.laddr.port)
        for process in processes
        for c in process.net_connections(kind="inet")
        if c.status == psutil.CONN_LISTEN or (c.type.name == "SOCK_DGRAM" and c.laddr)
    ]
    assert len(sockets) >= 8, sockets
    assert [entry for entry in sockets if not is_loopback(entry[1])] == []
    assert cluster_runtime.address.startswith("127.0.0.1:")


def test_killed_rank_surfaces_while_the_other_waits_in_a_barrier(gloo: RayWorkerGroup) -> None:
    # Last user of the group: it does not survive.
    pids = gloo.pids()
    start = time.monotonic()
    with pytest.raises(
        WorkerError, match="worker group 'gloo': rank 1 of 2 failed in barrier_unless: the worker process"
    ):
        gloo.get_all_worker_results(gloo.run_all_workers_single_data("barrier_unless", 1))
    assert time.monotonic() - start < 15
    deadline = time.monotonic() + 20
    while [pid for pid in pids if psutil.pid_exists(pid)] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


def test_store_binds_one_address_and_is_found_by_its_port() -> None:
    store = rendezvous.create_store(0, 2, "127.0.0.1", 0)
    mine = [c.laddr for c in psutil.Process().net_connections(kind="inet") if c.laddr and c.laddr.port == store.port]
    assert {address.ip for address in mine} == {"127.0.0.1"}
    assert rendezvous.create_store(0, 2, "127.0.0.1", store.port) is store
    client = rendezvous.create_store(1, 2, "127.0.0.1", store.port)
    client.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(ValueError, match="port: got 0 on rank 1"):
        rendezvous.create_store(1, 2, "127.0.0.1", 0)
    rendezvous.destroy_process_group()


def test_two_stores_never_share_a_port() -> None:
    first, second = (rendezvous.create_store(0, 1, "127.0.0.1", 0) for _ in range(2))
    assert first.port != second.port
    rendezvous.destroy_process_group()


def test_collectives_without_a_process_group_see_one_rank() -> None:
    value = torch.tensor([1.0, 2.0], requires_grad=True)
    total = collectives.all_reduce_sum(value)
    assert total.tolist() == [1.0, 2.0]
    assert not total.requires_grad
    assert total.data_ptr() != value.data_ptr()
    collectives.barrier()
