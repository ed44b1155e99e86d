"""Groups of Ray actors that act as the ranks of one job: spawn, dispatch, collect, fail as one, shut down."""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.distributed.ray_runtime import is_local_cluster, raise_received_signal, worker_log_tail
from nemo_rl.distributed.virtual_cluster import BundleSlot, RayVirtualCluster
from nemo_rl.distributed.worker_host import RemoteFailure, WorkerHost
from nemo_rl.errors import NemoRLError, WorkerError

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Longest time inside one Ray call, so that Ctrl-C is answered."""
FAILURE_GRACE_S = 5.0
"""After a first failure: time for the other ranks to finish or fail as well; after it they count as hanging."""
START_TIMEOUT_S = 300.0
CLOSE_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class _Call:
    """What a pending result belongs to."""

    rank: int
    method: str
    is_returned: bool = True


@dataclass(frozen=True)
class _Failure:
    call: _Call
    is_death: bool
    summary: str
    detail: str
    cause: NemoRLError | None


class RayWorkerBuilder:
    """Recipe of a worker: its class by name and the arguments of its constructor, equal on every rank.

    Args:
        worker_cls_path: "package.module:Class"; imported in the worker's process only.
        *init_args: positional arguments of the class.
        **init_kwargs: keyword arguments of the class.
    """

    def __init__(self, worker_cls_path: str, *init_args: Any, **init_kwargs: Any) -> None:
        self.worker_cls_path = worker_cls_path
        self.init_args = init_args
        self.init_kwargs = init_kwargs


class RayWorkerGroup:
    """The ranks of one job, one actor each, on the slots of a virtual cluster.

    Construction starts the actors and returns; :meth:`wait_until_built`, or the first collected result, tells whether
    every worker came up. Each worker finds ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``NODE_RANK`` and ``MASTER_ADDR``
    in its environment. No port is chosen in advance: see :meth:`init_process_groups`.

    Args:
        cluster: slots to use; groups on one cluster are colocated.
        builder: what to build in each actor.
        num_workers: ranks; None is one per ``bundles_per_worker`` slots of the cluster.
        env_vars: environment of every worker, or one mapping per rank.
        name_prefix: name of the group in errors and of its actors in Ray.
        colocated_gpu_fraction: share of the slot's GPU; None is an equal part for each group the cluster allows.
        bundles_per_worker: slots that one worker uses; its GPUs are those of all its slots (tensor-parallel engines).
        sharding: rank grid for :meth:`run_all_workers_sharded_data`.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        builder: RayWorkerBuilder,
        *,
        num_workers: int | None = None,
        env_vars: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
        name_prefix: str = "worker",
        colocated_gpu_fraction: float | None = None,
        bundles_per_worker: int = 1,
        sharding: NamedSharding | None = None,
    ) -> None:
        slots = cluster.slots()
        self.name = name_prefix
        self.num_workers = len(slots) // bundles_per_worker if num_workers is None else num_workers
        if not 1 <= self.num_workers * bundles_per_worker <= len(slots):
            raise ValueError(
                f"{name_prefix}: got {self.num_workers} workers of {bundles_per_worker} slots; the cluster has "
                f"{len(slots)} slots. Build the cluster with one slot per worker."
            )
        if sharding is not None and sorted(sharding.layout.ravel().tolist()) != list(range(self.num_workers)):
            raise ValueError(f"{name_prefix}: sharding {sharding} must hold the ranks 0 to {self.num_workers - 1}.")
        self.sharding = sharding
        self._cluster = cluster
        self._claim = f"{name_prefix}-{uuid.uuid4().hex[:8]}"
        share = 1 / cluster.max_colocated_worker_groups if colocated_gpu_fraction is None else colocated_gpu_fraction
        cluster.claim_gpu_share(self._claim, share=share)
        self._share = share if cluster.use_gpus else 0
        self._calls: dict[str, _Call] = {}
        self._failure: str | None = None
        self._is_started = False
        envs = _env_per_rank(env_vars, num_workers=self.num_workers, name=name_prefix)
        first_slots = slots[::bundles_per_worker][: self.num_workers]
        per_node = _slots_per_node(first_slots)
        self._workers: list[ActorHandle] = [
            self._spawn(
                rank,
                slots=slots[rank * bundles_per_worker : (rank + 1) * bundles_per_worker],
                env={**envs[rank], **self._rank_env(rank, slot=first_slots[rank], local_rank=per_node[rank])},
            )
            for rank in range(self.num_workers)
        ]
        self._pids: list[ObjectRef] = [worker.pid.remote() for worker in self._workers]
        master_addr = self._workers[0].node_ip.remote()
        self._built = [
            self._note(
                worker.build.remote(builder.worker_cls_path, master_addr, builder.init_args, builder.init_kwargs),
                _Call(rank, "__init__"),
            )
            for rank, worker in enumerate(self._workers)
        ]

    @property
    def workers(self) -> list[ActorHandle]:
        """The actors, by rank."""
        return list(self._workers)

    def pids(self) -> list[int]:
        """Process ids of the workers, by rank."""
        self._wait_until_started()
        return ray.get(self._pids)

    def wait_until_built(self) -> None:
        """Wait until every worker is constructed; raises :class:`WorkerError` if one is not."""
        built, self._built = self._built, []
        self.get_all_worker_results(built)

    # --- dispatch ----------------------------------------------------------------------------------------------------

    def run_rank(self, rank: int, method: str, *args: Any, **kwargs: Any) -> ObjectRef:
        """Call a method of one worker; collect with :meth:`get_all_worker_results`."""
        return self._call(_Call(rank, method), args, kwargs)

    def run_all_workers_single_data(self, method: str, *args: Any, **kwargs: Any) -> list[ObjectRef]:
        """Call a method of every worker with the same arguments; an ObjectRef among them arrives as its value."""
        if self.num_workers > 1:  # serialise large values once, not once per rank
            args = tuple(_shared(value) for value in args)
            kwargs = {key: _shared(value) for key, value in kwargs.items()}
        return [self._call(_Call(rank, method), args, kwargs) for rank in range(self.num_workers)]

    def run_all_workers_multiple_data(self, method: str, per_worker: Sequence[Mapping[str, Any]]) -> list[ObjectRef]:
        """Call a method of every worker with its own keyword arguments.

        Args:
            method: name of the worker's method.
            per_worker: keyword arguments, by rank.
        """
        if len(per_worker) != self.num_workers:
            raise ValueError(
                f"{self.name}.{method}: got arguments for {len(per_worker)} of {self.num_workers} workers."
            )
        return [self._call(_Call(rank, method), (), kwargs) for rank, kwargs in enumerate(per_worker)]

    def run_all_workers_sharded_data(
        self,
        method: str,
        *,
        in_sharded_axes: Sequence[str],
        replicate_on_axes: Sequence[str] = (),
        output_is_replicated: Sequence[str] = (),
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Sequence[Any],
    ) -> list[ObjectRef]:
        """Give each rank the slice of the data that its place in the sharding asks for.

        Args:
            method: name of the worker's method.
            in_sharded_axes: axes along which the data is split: one level of list nesting each, in this order.
            replicate_on_axes: axes whose ranks all receive the same slice. On any other axis only index 0 is called.
            output_is_replicated: axes along which results repeat; only index 0 is returned (all are waited for).
            common_kwargs: arguments that every called rank receives as they are.
            **kwargs: argument name to (nested) list of slices.

        Returns:
            Results to collect, in rank order.
        """
        sharding = self._checked_sharding(method, sharded=in_sharded_axes, replicated=replicate_on_axes)
        for axis in output_is_replicated:
            sharding.get_axis_index(axis)
        if any(sharding.get_axis_size(axis) > 1 for axis in replicate_on_axes):
            kwargs = {key: _map_leaves(value, _shared, depth=len(in_sharded_axes)) for key, value in kwargs.items()}
        called_axes = {*in_sharded_axes, *replicate_on_axes}
        refs = []
        for rank in range(self.num_workers):
            coords = sharding.get_worker_coords(rank)
            if any(index != 0 for axis, index in coords.items() if axis not in called_axes):
                continue
            path = [coords[axis] for axis in in_sharded_axes]
            own = {key: self._leaf(method, key, value, path) for key, value in kwargs.items()}
            call = _Call(rank, method, is_returned=all(coords[axis] == 0 for axis in output_is_replicated))
            refs.append(self._call(call, (), {**own, **(common_kwargs or {})}))
        return refs

    def init_process_groups(self, method: str = "init_process_group", *, bind: str = "bind_rendezvous") -> None:
        """Let the ranks meet: rank 0 binds a port of the system's choice, then every rank gets its address.

        The worker class defines ``bind_rendezvous() -> (host, port)``, called on rank 0, and
        ``init_process_group(host, port)``, called on all ranks.
        """
        host, port = self.get_all_worker_results(self.run_rank(0, bind))[0]
        self.get_all_worker_results(self.run_all_workers_single_data(method, host, port))

    # --- collection --------------------------------------------------------------------------------------------------

    def get_all_worker_results(self, refs: ObjectRef | Sequence[ObjectRef]) -> list[Any]:
        """Wait for calls of this group and return their values in the order of ``refs``.

        A failure is raised as soon as it is known, also while other ranks hang in a collective. After an exception the
        group stays usable if all its ranks have finished; a rank that died, or ranks that wait for a failed one, end
        the group: its processes are killed.

        Raises:
            WorkerError: names group, rank and method and carries the remote traceback. ``__cause__`` is the exception
                of the worker itself if that is one of nemo_rl's, else None.
        """
        refs = [refs] if isinstance(refs, ObjectRef) else list(refs)
        if self._failure is not None:
            raise self._error(self._failure)
        self._wait_until_started()
        calls = {ref: self._calls.pop(ref.hex(), _Call(-1, "?")) for ref in refs}
        results: dict[ObjectRef, Any] = {}
        failures: list[_Failure] = []
        pending = list(calls)
        deadline = None
        while pending and (deadline is None or time.monotonic() < deadline):
            ready, pending = self._wait(pending)
            for ref in ready:
                try:
                    results[ref] = ray.get(ref)
                except RayError as err:
                    failures.append(self._describe(calls[ref], err))
            if failures and deadline is None:
                deadline = time.monotonic() + FAILURE_GRACE_S
        if failures:
            raise self._fail(failures, hanging=[calls[ref] for ref in pending])
        return [results[ref] for ref in refs if calls[ref].is_returned]

    def shutdown(self) -> None:
        """Ask each worker to end, wait a little, kill what stays. The cluster keeps its slots. May be called twice."""
        workers, self._workers = self._workers, []
        if not workers or not ray.is_initialized():
            return
        if self._failure is None:
            closing: list[ObjectRef] = [worker.close.remote() for worker in workers]
            _, late = ray.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
            for rank, ref in enumerate(closing):
                if ref in late:
                    log.warning("%s rank %d did not shut down within %.0f s; killed.", self.name, rank, CLOSE_TIMEOUT_S)
                    continue
                try:
                    ray.get(ref)
                except RayError as err:
                    log.warning("%s rank %d failed while shutting down: %s", self.name, rank, err)
            self._failure = "it was shut down"
        self._kill(workers)
        self._cluster.release_gpu_share(self._claim)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _spawn(self, rank: int, *, slots: Sequence[BundleSlot], env: Mapping[str, str]) -> ActorHandle:
        env = dict(env)
        if len(slots) > 1 and self._cluster.use_gpus:
            # Ray shows an actor the GPU of its own bundle only; this worker drives those of several.
            env["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
            env["CUDA_VISIBLE_DEVICES"] = ",".join(str(slot.gpu_id) for slot in slots)
        actor = ray.remote(WorkerHost).options(
            name=f"{self._claim}-{rank}",
            num_cpus=0,
            num_gpus=self._share,
            max_restarts=0,
            max_task_retries=0,
            runtime_env={"env_vars": env},
            scheduling_strategy=slots[0].scheduling(),
        )
        handle = actor.remote()
        assert isinstance(handle, ActorHandle), "the remote form of a class makes actors"
        return handle

    def _rank_env(self, rank: int, *, slot: BundleSlot, local_rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.num_workers),
            "LOCAL_RANK": str(local_rank),
            "NODE_RANK": str(slot.node_rank),
        }

    def _call(self, call: _Call, args: tuple, kwargs: Mapping[str, Any]) -> ObjectRef:
        if self._failure is not None:
            raise self._error(self._failure)
        if not 0 <= call.rank < self.num_workers:
            raise ValueError(f"{self.name}.{call.method}: got rank {call.rank}; ranks are 0 to {self.num_workers - 1}.")
        return self._note(self._workers[call.rank].call.remote(call.method, *args, **kwargs), call)

    def _note(self, ref: ObjectRef, call: _Call) -> ObjectRef:
        self._calls[ref.hex()] = call
        return ref

    def _wait_until_started(self) -> None:
        """Wait for the actors' processes, which Ray may be unable to place."""
        deadline = time.monotonic() + START_TIMEOUT_S
        pending = [] if self._is_started else list(self._pids)
        while pending:
            raise_received_signal()
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_S)
            if pending and time.monotonic() > deadline:
                waiting = [rank for rank, ref in enumerate(self._pids) if ref in pending]
                self._abort(f"ranks {waiting} did not start within {START_TIMEOUT_S:.0f} s")
                raise self._error(f"{self._failure}; the Ray cluster has {ray.available_resources()} free")
        self._is_started = True

    def _wait(self, pending: list[ObjectRef]) -> tuple[list[ObjectRef], list[ObjectRef]]:
        try:
            raise_received_signal()
            return ray.wait(pending, num_returns=1, timeout=POLL_S)
        except (KeyboardInterrupt, SystemExit):
            self._failure = "a call was interrupted"  # the workers are busy: shutdown must not wait for them
            raise

    def _describe(self, call: _Call, err: RayError) -> _Failure:
        remote = err.cause if isinstance(err, RayTaskError) else err
        if isinstance(remote, RemoteFailure):
            return _Failure(call, False, f"{remote.kind}: {remote.message}", remote.traceback_text, remote.cause)
        if isinstance(remote, RayActorError):
            tail = worker_log_tail(self._pid_of(call.rank))
            detail = f"{remote}\n--- end of its stderr ---\n{tail}" if tail else str(remote)
            return _Failure(call, True, "the worker process died", detail, None)
        return _Failure(call, False, type(remote).__qualname__, str(err), None)

    def _pid_of(self, rank: int) -> int:
        try:
            return ray.get(self._pids[rank], timeout=POLL_S)
        except RayError:
            return -1

    def _fail(self, failures: list[_Failure], *, hanging: list[_Call]) -> WorkerError:
        """Choose the failure to report: a death explains the errors that its peers see, so it comes first."""
        first = min(failures, key=lambda failure: not failure.is_death)
        if first.is_death or hanging:
            self._abort(f"rank {first.call.rank} failed in {first.call.method} ({first.summary})")
        others = [f"rank {f.call.rank}: {f.summary}" for f in failures if f is not first]
        others += [f"rank {call.rank}: still in {call.method}, killed" for call in hanging]
        also = "\nOther ranks: " + "; ".join(others) if others else ""
        head = f"rank {first.call.rank} of {self.num_workers} failed in {first.call.method}: {first.summary}"
        return self._error(f"{head}\n{first.detail.rstrip()}{also}", cause=first.cause)

    def _error(self, text: str, *, cause: NemoRLError | None = None) -> WorkerError:
        error = WorkerError(f"worker group {self.name!r}: {text}")
        error.__cause__ = cause
        return error

    def _abort(self, reason: str) -> None:
        self._failure = reason
        log.error("Worker group %s ends: %s", self.name, reason)
        self._kill(self._workers)

    def _kill(self, workers: list[ActorHandle]) -> None:
        """Kill the actors and wait until the processes on this machine are gone, so that their memory is free."""
        pids = ray.wait(self._pids, num_returns=len(self._pids), timeout=0)[0]
        processes = []
        for ref in pids if is_local_cluster() else []:
            with contextlib.suppress(psutil.NoSuchProcess, RayError):
                processes.append(psutil.Process(ray.get(ref)))
        for worker in workers:
            ray.kill(worker, no_restart=True)
        psutil.wait_procs(processes, timeout=CLOSE_TIMEOUT_S)

    def _checked_sharding(self, method: str, *, sharded: Sequence[str], replicated: Sequence[str]) -> NamedSharding:
        if self.sharding is None:
            raise ValueError(f"{self.name}.{method}: sharded dispatch needs a group that was built with a sharding.")
        for axis in (*sharded, *replicated):
            self.sharding.get_axis_index(axis)
        both = set(sharded) & set(replicated)
        if both:
            raise ValueError(f"{self.name}.{method}: axes {sorted(both)} cannot be both sharded and replicated.")
        return self.sharding

    def _leaf(self, method: str, key: str, value: Sequence[Any], path: Sequence[int]) -> Any:
        """Descend into nested slices along the rank's coordinates."""
        for index in path:
            if not 0 <= index < len(value):
                raise ValueError(f"{self.name}.{method}: {key} has {len(value)} slices; slice {index} is asked for.")
            value = value[index]
        return value


def _env_per_rank(
    env_vars: Mapping[str, str] | Sequence[Mapping[str, str]] | None, *, num_workers: int, name: str
) -> list[Mapping[str, str]]:
    if env_vars is None:
        return [{}] * num_workers
    if isinstance(env_vars, Mapping):
        return [env_vars] * num_workers
    if len(env_vars) != num_workers:
        raise ValueError(f"{name}: got {len(env_vars)} environments for {num_workers} workers.")
    return list(env_vars)


def _slots_per_node(slots: Sequence[BundleSlot]) -> list[int]:
    """Number the workers of each node from 0."""
    seen: dict[int, int] = {}
    numbers = []
    for slot in slots:
        numbers.append(seen.get(slot.node_rank, 0))
        seen[slot.node_rank] = numbers[-1] + 1
    return numbers


def _shared(value: Any) -> Any:
    """Put a value into the object store once for many receivers; small scalars travel with the call."""
    return value if value is None or isinstance(value, bool | int | float | str | ObjectRef) else ray.put(value)


def _map_leaves(value: Sequence[Any], fn: Any, *, depth: int) -> Any:
    return fn(value) if depth == 0 else [_map_leaves(part, fn, depth=depth - 1) for part in value]
