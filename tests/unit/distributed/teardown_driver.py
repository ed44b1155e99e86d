"""A driver that starts a cluster and two workers, says what runs, and ends in the way that it is told to."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import psutil
import ray

from nemo_rl.algorithms.config import ClusterConfig
from nemo_rl.distributed.ray_runtime import init_ray, shutdown_ray
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup


def main(ending: str, log_dir: str) -> None:
    # A process started from a background job or a test worker inherits an ignored Ctrl-C; a terminal's does not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runtime = init_ray(ClusterConfig(device="cpu", object_store_memory=100 * 2**20), log_dir=log_dir)
    cluster = RayVirtualCluster([1], use_gpus=False, num_gpus_per_node=0)
    group = RayWorkerGroup(cluster, RayWorkerBuilder("cluster_workers:EchoWorker", "x"), name_prefix="teardown")
    pids = group.pids()
    answers = group.get_all_worker_results(group.run_all_workers_single_data("echo", 5))
    processes = {str(p.pid): p.create_time() for p in psutil.Process().children(recursive=True)}
    report = {"processes": processes, "workers": pids, "run_dir": str(runtime.run_dir), "answers": answers}
    report |= {"driver": os.getpid(), "imported": [name for name in ("torch", "vllm") if name in sys.modules]}
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()
    if ending == "error":
        raise RuntimeError("the run failed")
    if ending == "success":
        group.shutdown()
        cluster.shutdown()
        shutdown_ray()
        assert not ray.is_initialized()
        return
    if ending == "joined":
        shutdown_ray()
        return
    time.sleep(0.2)
    group.get_all_worker_results(group.run_all_workers_single_data("hang"))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
