"""Placement groups: one bundle of resources per worker slot, shared by the worker groups that are colocated on it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl.errors import ConfigError, WorkerError

CPU_PER_BUNDLE = 0.01
"""Workers count their threads themselves; a bundle reserves just enough for Ray to place it."""
PLACEMENT_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class BundleSlot:
    """Where one worker goes."""

    placement_group: PlacementGroup
    bundle_index: int
    node_rank: int
    """Index of the node in the cluster."""
    local_rank: int
    """Index of the slot on its node; on CUDA in the order of the GPUs."""
    gpu_id: int | None
    """The GPU of the bundle, as CUDA numbers it on the node; None without GPUs."""

    def scheduling(self) -> PlacementGroupSchedulingStrategy:
        """Ray's scheduling strategy for an actor in this slot."""
        return PlacementGroupSchedulingStrategy(
            self.placement_group,
            placement_group_bundle_index=self.bundle_index,
            placement_group_capture_child_tasks=True,
        )


class RayVirtualCluster:
    """A fixed set of worker slots, by node.

    Args:
        bundle_ct_per_node_list: worker slots of each node.
        use_gpus: give each slot one GPU.
        num_gpus_per_node: GPUs of a node; a node may not hold more GPU slots.
        max_colocated_worker_groups: worker groups that share each slot's GPU.
        name: prefix of the placement groups' names.
    """

    def __init__(
        self,
        bundle_ct_per_node_list: list[int],
        *,
        use_gpus: bool,
        num_gpus_per_node: int,
        max_colocated_worker_groups: int = 1,
        name: str = "cluster",
    ) -> None:
        if not bundle_ct_per_node_list or min(bundle_ct_per_node_list) < 1:
            raise ValueError(
                f"bundle_ct_per_node_list: got {bundle_ct_per_node_list}; needs at least one slot per node."
            )
        if use_gpus and max(bundle_ct_per_node_list) > num_gpus_per_node:
            raise ConfigError(
                f"cluster.gpus_per_node: got {num_gpus_per_node}; {max(bundle_ct_per_node_list)} workers are asked for "
                "on one node and each needs a GPU. Lower the number of workers or raise cluster.gpus_per_node."
            )
        if max_colocated_worker_groups < 1:
            raise ValueError(f"max_colocated_worker_groups: got {max_colocated_worker_groups}; must be >= 1.")
        self.name = name
        self.use_gpus = use_gpus
        self.max_colocated_worker_groups = max_colocated_worker_groups
        self._bundle_counts = list(bundle_ct_per_node_list)
        self._placement_groups: list[PlacementGroup] = []
        self._slots: list[BundleSlot] = []
        self._gpu_shares: dict[str, float] = {}

    def world_size(self) -> int:
        """Number of worker slots."""
        return sum(self._bundle_counts)

    def node_count(self) -> int:
        """Number of nodes."""
        return len(self._bundle_counts)

    def get_placement_groups(self) -> list[PlacementGroup]:
        """One placement group per node, created and waited for at the first call."""
        if not self._placement_groups:
            self._check_resources()
            self._placement_groups = [
                placement_group([self._bundle()] * count, strategy="STRICT_PACK", name=f"{self.name}-node{node}")
                for node, count in enumerate(self._bundle_counts)
            ]
            self._wait_until_placed()
        return list(self._placement_groups)

    def slots(self) -> list[BundleSlot]:
        """Every worker slot: nodes in order, on each node by GPU."""
        if not self._slots:
            groups = self.get_placement_groups()
            for node, (group, count) in enumerate(zip(groups, self._bundle_counts, strict=True)):
                gpu_ids = _gpu_of_bundles(group, count) if self.use_gpus else [None] * count
                # Ray numbers bundles in any order: neighbours in rank should be neighbours on the bus.
                order = sorted(range(count), key=lambda index, ids=gpu_ids: (ids[index] or 0, index))
                self._slots += [
                    BundleSlot(group, bundle, node_rank=node, local_rank=local, gpu_id=gpu_ids[bundle])
                    for local, bundle in enumerate(order)
                ]
        return list(self._slots)

    def claim_gpu_share(self, owner: str, *, share: float) -> None:
        """Note that a worker group takes a share of every slot's GPU; more than the whole would wait in Ray forever."""
        if not self.use_gpus:
            return
        taken = sum(self._gpu_shares.values())
        if not 0 < share <= 1 - taken + 1e-6:
            raise ValueError(
                f"GPU share of worker group {owner!r}: got {share}; {sorted(self._gpu_shares)} already hold {taken}. "
                "All groups of a cluster share one GPU per slot: raise max_colocated_worker_groups, or end a group."
            )
        self._gpu_shares[owner] = share

    def release_gpu_share(self, owner: str) -> None:
        """Undo :meth:`claim_gpu_share`."""
        self._gpu_shares.pop(owner, None)

    def shutdown(self) -> None:
        """Remove the placement groups; Ray ends whatever still runs in them."""
        groups, self._placement_groups, self._slots = self._placement_groups, [], []
        self._gpu_shares.clear()
        if ray.is_initialized():
            for group in groups:
                remove_placement_group(group)

    def _bundle(self) -> dict[str, float]:
        return {"CPU": CPU_PER_BUNDLE, "GPU": 1} if self.use_gpus else {"CPU": CPU_PER_BUNDLE}

    def _check_resources(self) -> None:
        if not self.use_gpus:
            return
        present = int(ray.cluster_resources().get("GPU", 0))
        if present < self.world_size():
            raise ConfigError(
                f"cluster.gpus_per_node x cluster.num_nodes: {self.world_size()} GPU workers are asked for; the Ray "
                f"cluster has {present} GPUs. Lower them, or add nodes to the cluster."
            )

    def _wait_until_placed(self) -> None:
        deadline = time.monotonic() + PLACEMENT_TIMEOUT_S
        if all(group.wait(max(1, deadline - time.monotonic())) for group in self._placement_groups):
            return
        free = ray.available_resources()
        self.shutdown()
        raise WorkerError(
            f"cluster {self.name!r}: no place for {self._bundle_counts} workers of {self._bundle()} within "
            f"{PLACEMENT_TIMEOUT_S:.0f} s; the Ray cluster has {free} free. Stop what else runs on it, or ask for less."
        )


def _gpu_of_bundles(group: PlacementGroup, count: int) -> list[int]:
    """Ask each bundle which GPU it holds."""
    probe = ray.remote(num_cpus=0, num_gpus=1)(_assigned_gpu)
    return ray.get(
        [
            probe.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle)).remote()
            for bundle in range(count)
        ]
    )


def _assigned_gpu() -> int:
    return int(ray.get_gpu_ids()[0])
