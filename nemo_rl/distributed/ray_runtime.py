"""Ray for one run: start a private cluster on this machine, or join ``RAY_ADDRESS``; stop it without leftovers.

A local cluster listens on the loopback interface only and lives in a private directory that goes with it. Ray's token
authentication stays on. Whatever ends the driver (return, exception, Ctrl-C, SIGTERM) ends every process of it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray._private import ray_constants
from ray.exceptions import AuthenticationError

from nemo_rl.distributed.device import is_joining_cluster, resolve_device, visible_gpu_count
from nemo_rl.distributed.environment import LOOPBACK
from nemo_rl.errors import ConfigError, WorkerError

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import ClusterConfig

log = logging.getLogger(__name__)

DEFAULT_OBJECT_STORE_BYTES = 3 * 2**29
SHM_SHARE = 0.3
MIN_OBJECT_STORE_BYTES = 80 * 2**20
"""Ray refuses less than 75 MiB."""
DISK_OBJECT_STORE_BYTES = 512 * 2**20

UNIX_SOCKET_PATH_LIMIT = 107
RUN_DIR_PREFIX = "nrl-"
LONGEST_SOCKET_TAIL = f"/{RUN_DIR_PREFIX}01234567/r/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"

CONNECT_TIMEOUT_S = 5.0
EXIT_TIMEOUT_S = 5.0

LOCAL_CLUSTER_ENV = {
    # Ray replaces a loopback node address by the machine's outer one, and its servers then listen on every interface,
    # unless this says that the platform runs no multi-node cluster. Removal condition: ray.init keeps
    # _node_ip_address="127.0.0.1" as given (test_nothing_listens_beyond_loopback passes without it).
    ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
    # The monitor's metrics port is a constant otherwise, over which two clusters on one machine would fight.
    "AUTOSCALER_METRIC_PORT": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
SYSTEM_CONFIG = {
    # No idle workers started ahead: ours have an environment of their own and could not use them.
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
    "worker_register_timeout_seconds": 180,  # a Python process that starts on a busy machine takes its time
}
START_ATTEMPTS = 2


@dataclass(frozen=True)
class ObjectStorePlan:
    """Size and place of Ray's object store; directory None is shared memory."""

    num_bytes: int
    directory: Path | None = None


@dataclass(frozen=True)
class RayRuntime:
    """The cluster that this process drives."""

    device: str
    """"cuda" or "cpu"."""
    is_local: bool
    """Started here, on the loopback interface, for this run; False for a cluster that was joined."""
    address: str
    """Where the cluster's control store answers, host:port."""
    run_dir: Path | None
    """Private directory of a local cluster: sockets, logs, spilled objects."""


@dataclass
class _Session:
    """What :func:`shutdown_ray` has to undo."""

    runtime: RayRuntime
    owns_connection: bool
    log_dir: Path | None
    lock_fd: int | None = None
    head_processes: list[psutil.Process] = field(default_factory=list)
    old_handlers: dict[int, Any] = field(default_factory=dict)


_session: _Session | None = None
_received_signal: int | None = None
"""The signal that is ending the driver."""


def init_ray(cluster_cfg: ClusterConfig, *, log_dir: str | Path | None = None) -> RayRuntime:
    """Start a local cluster, or join the one that ``RAY_ADDRESS`` names. A second call returns the first one's result.

    Args:
        cluster_cfg: the ``cluster`` section (device, gpus_per_node, object_store_memory).
        log_dir: the run's log directory; output of the workers is kept in its ``ray`` folder at the end.

    Returns:
        What was started or joined. :func:`shutdown_ray` ends it; interpreter exit, Ctrl-C and SIGTERM do as well.

    Raises:
        ConfigError: ``RAY_ADDRESS`` leads nowhere, or a ``cluster`` value does not fit this machine.
        WorkerError: Ray did not start.
    """
    global _session
    if _session is not None:
        return _session.runtime
    device = resolve_device(cluster_cfg.device)
    keep = Path(log_dir) if log_dir is not None else None
    old_handlers = {number: signal.getsignal(number) for number in _ending_signals()}
    if ray.is_initialized():
        address = ray.get_runtime_context().gcs_address
        _session = _Session(RayRuntime(device, False, address, None), owns_connection=False, log_dir=None)
        return _session.runtime
    _session = _join(device) if is_joining_cluster() else _start_local(cluster_cfg, device=device, log_dir=keep)
    _session.old_handlers = old_handlers
    for number in old_handlers:
        signal.signal(number, _exit_on_signal)
    atexit.register(shutdown_ray)
    return _session.runtime


def shutdown_ray() -> None:
    """End the local cluster and every process of it, or leave a joined one. Harmless when nothing runs."""
    global _session, _received_signal
    session, _session = _session, None
    if session is None or not session.owns_connection:
        return
    atexit.unregister(shutdown_ray)
    _stop(session)
    _received_signal = None
    for number, handler in session.old_handlers.items():
        signal.signal(number, handler)


def is_local_cluster() -> bool:
    """Whether the cluster was started here, so that its workers are processes of this machine."""
    return _session is not None and _session.runtime.is_local


def worker_log_tail(pid: int, *, num_lines: int = 20) -> str:
    """Last lines that a worker of the local cluster wrote to stderr; empty for a joined cluster."""
    if _session is None or _session.runtime.run_dir is None:
        return ""
    files = list(_session.runtime.run_dir.glob(f"r/session_latest/logs/worker-*-{pid}.err"))
    if not files:
        return ""
    return "\n".join(files[0].read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])


def plan_object_store(
    requested: int | None, *, shm_dir: str | Path = "/dev/shm", fallback_dir: Path
) -> ObjectStorePlan:
    """Choose size and place of the object store.

    Args:
        requested: ``cluster.object_store_memory`` in bytes; None takes 30% of the free shared memory, at most 1.5 GiB.
        shm_dir: the shared-memory file system.
        fallback_dir: where the store goes when shared memory is too small for any store.

    Raises:
        ConfigError: the requested size does not fit into shared memory, or is below Ray's minimum.
    """
    free = shutil.disk_usage(shm_dir).free if Path(shm_dir).is_dir() else 0
    if requested is not None:
        if not MIN_OBJECT_STORE_BYTES <= requested <= free:
            raise ConfigError(
                f"cluster.object_store_memory: got {requested}; must lie between {MIN_OBJECT_STORE_BYTES} and the "
                f"{free} bytes that are free in {shm_dir}. Set it to null to have it chosen, or enlarge {shm_dir}."
            )
        return ObjectStorePlan(requested)
    chosen = min(DEFAULT_OBJECT_STORE_BYTES, int(SHM_SHARE * free))
    if chosen < MIN_OBJECT_STORE_BYTES:
        log.warning(
            "%s has %d bytes free: Ray's object store goes to %s, which is slower. Enlarge it (docker: --shm-size).",
            shm_dir,
            free,
            fallback_dir,
        )
        return ObjectStorePlan(DISK_OBJECT_STORE_BYTES, fallback_dir)
    return ObjectStorePlan(chosen)


def socket_base_dir(preferred: str | Path | None = None) -> Path:
    """Temporary directory short enough for Ray's socket files, whose paths the system limits to 107 bytes."""
    for base in (preferred or tempfile.gettempdir(), "/tmp"):
        fits = len(os.fsencode(str(base) + LONGEST_SOCKET_TAIL)) <= UNIX_SOCKET_PATH_LIMIT
        if fits and os.access(base, os.W_OK | os.X_OK):
            return Path(base)
    room = UNIX_SOCKET_PATH_LIMIT - len(LONGEST_SOCKET_TAIL)
    raise ConfigError(
        f"TMPDIR: got {tempfile.gettempdir()!r}; Ray's sockets need a writable directory whose path has at most {room} "
        "bytes, and /tmp is not writable. Set TMPDIR to a shorter path."
    )


# --- local cluster ---------------------------------------------------------------------------------------------------


def _start_local(cluster_cfg: ClusterConfig, *, device: str, log_dir: Path | None) -> _Session:
    """Start a cluster; once more if Ray gave up on itself, which it does after 30 s of a busy machine."""
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            return _try_start_local(cluster_cfg, device=device, log_dir=log_dir)
        except ConfigError:
            raise
        except Exception as err:
            if attempt == START_ATTEMPTS:
                kept = f" Its logs are in {log_dir / 'ray'}." if log_dir else ""
                raise WorkerError(f"Ray did not start on this machine: {err}.{kept}") from err
            log.warning("Ray did not start (%s); trying once more.", err)
    raise AssertionError("unreachable: the last attempt returns or raises")


def _try_start_local(cluster_cfg: ClusterConfig, *, device: str, log_dir: Path | None) -> _Session:
    base = socket_base_dir()
    _remove_stale_run_dirs(base)
    run_dir, lock_fd = _make_run_dir(base)
    me = psutil.Process()
    before = set(me.children())
    session = _Session(RayRuntime(device, True, "", run_dir), True, log_dir, lock_fd=lock_fd)
    try:
        (run_dir / "r").mkdir()
        store = plan_object_store(cluster_cfg.object_store_memory, fallback_dir=run_dir / "r")
        with _local_cluster_settings():
            ray.init(
                address="local",
                num_cpus=len(os.sched_getaffinity(0)),
                num_gpus=_local_gpus(cluster_cfg, device=device),
                include_dashboard=False,
                object_store_memory=store.num_bytes,
                log_to_driver=False,  # the text of a failure travels in WorkerError
                logging_level=logging.ERROR,
                _node_ip_address=LOOPBACK,
                _temp_dir=str(run_dir / "r"),
                _plasma_directory=str(store.directory) if store.directory else None,
                _system_config=SYSTEM_CONFIG,
            )
        address = ray.get_runtime_context().gcs_address
        if not address.startswith(f"{LOOPBACK}:"):
            raise RuntimeError(f"Ray's control store answers at {address}, not on the loopback interface")
    except BaseException:
        session.head_processes = [child for child in me.children() if child not in before]
        _stop(session)
        raise
    session.head_processes = [child for child in me.children() if child not in before]
    session.runtime = RayRuntime(device, True, address, run_dir)
    return session


def _local_gpus(cluster_cfg: ClusterConfig, *, device: str) -> int:
    if device == "cpu":
        return 0
    visible = visible_gpu_count()
    if cluster_cfg.gpus_per_node > visible:
        raise ConfigError(
            f"cluster.gpus_per_node: got {cluster_cfg.gpus_per_node}; {visible} GPUs are visible here. "
            "Lower it, or join a larger cluster through RAY_ADDRESS."
        )
    return visible


@contextlib.contextmanager
def _local_cluster_settings() -> Iterator[None]:
    """Environment that Ray's processes inherit, and the same answer for the constant that Ray read at its import."""
    old = {name: os.environ.get(name) for name in LOCAL_CLUSTER_ENV}
    old_constant = ray_constants.ENABLE_RAY_CLUSTER
    os.environ.update(LOCAL_CLUSTER_ENV)
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = old_constant
        for name, value in old.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _make_run_dir(base: Path) -> tuple[Path, int]:
    """Create the private directory and lock it for the life of this process."""
    run_dir = Path(tempfile.mkdtemp(prefix=RUN_DIR_PREFIX, dir=base))
    lock_fd = os.open(run_dir / "lock.new", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.rename(run_dir / "lock.new", run_dir / "lock")  # nobody ever sees it unlocked
    return run_dir, lock_fd


def _remove_stale_run_dirs(base: Path) -> None:
    """Remove what a driver left that was killed before it could clean up: directories of ours whose lock is free."""
    for lock in base.glob(f"{RUN_DIR_PREFIX}*/lock"):
        with contextlib.suppress(OSError):
            if lock.stat().st_uid != os.getuid():
                continue
            fd = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(fd)


# --- joined cluster --------------------------------------------------------------------------------------------------


def _join(device: str) -> _Session:
    given = os.environ["RAY_ADDRESS"]
    with _loopback_kept_as_given(given):
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError, AuthenticationError) as err:
            raise ConfigError(
                f"RAY_ADDRESS: got {given!r}; {err}. Set it to the host:port that `ray start --head` printed, "
                "or unset it to start a cluster on this machine."
            ) from err
    runtime = RayRuntime(device, False, ray.get_runtime_context().gcs_address, None)
    return _Session(runtime, True, None)


@contextlib.contextmanager
def _loopback_kept_as_given(address: str) -> Iterator[None]:
    """Check that a host:port answers before Ray tries for minutes, and keep Ray from rewriting a loopback-only host."""
    if address == "auto":
        yield
        return
    if "://" in address:
        raise ConfigError(
            f"RAY_ADDRESS: got {address!r}; must be host:port or 'auto'. Start the driver on a machine of the cluster."
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"RAY_ADDRESS: got {address!r}; must be host:port or 'auto', as `ray start --head` prints it."
        )
    host = host.strip("[]")
    if not _answers(host, int(port)):
        raise ConfigError(
            f"RAY_ADDRESS: got {address!r}; nothing answers there within {CONNECT_TIMEOUT_S:.0f} s. Start the cluster "
            "with `ray start --head`, or unset RAY_ADDRESS to start one on this machine."
        )
    is_loopback = host in ("localhost", LOOPBACK, "::1")
    old = ray_constants.ENABLE_RAY_CLUSTER
    if is_loopback and not _answers(ray.util.get_node_ip_address(), int(port)):
        ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = old


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


# --- the end ---------------------------------------------------------------------------------------------------------


def _stop(session: _Session) -> None:
    """Disconnect; a local cluster also ends: no process and no directory stays, the logs are kept."""
    with _interrupts_held_back():
        processes = _with_descendants(session.head_processes)
        try:
            ray.shutdown(wait_for_processes=session.runtime.is_local)
        except Exception:  # the processes must go whatever Ray says
            log.exception("Ray's own shutdown failed; its processes are killed.")
        _, alive = psutil.wait_procs(processes, timeout=EXIT_TIMEOUT_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=EXIT_TIMEOUT_S)
        if session.runtime.run_dir is not None:
            _keep_logs(session.runtime.run_dir, log_dir=session.log_dir)
            shutil.rmtree(session.runtime.run_dir, ignore_errors=True)
        if session.lock_fd is not None:
            os.close(session.lock_fd)


def _with_descendants(processes: list[psutil.Process]) -> list[psutil.Process]:
    found = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update({child.pid: child for child in [process, *process.children(recursive=True)]})
    return list(found.values())


def _keep_logs(run_dir: Path, *, log_dir: Path | None) -> None:
    """Copy what workers printed, and errors of Ray's processes, to ``<log_dir>/ray/<session>``; skips empty files."""
    logs = run_dir / "r" / "session_latest" / "logs"
    if log_dir is None or not logs.is_dir():
        return
    target = log_dir / "ray" / logs.resolve().parent.name
    try:
        for pattern in ("worker-*.out", "worker-*.err", "*_server.err", "raylet.err", "dashboard.err"):
            for source in logs.glob(pattern):
                if source.stat().st_size:
                    target.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source, target / source.name)
    except OSError as err:
        log.warning("The workers' output could not be kept in %s: %s", target, err)


def _ending_signals() -> tuple[int, ...]:
    """Signals whose default action would end the driver without clean-up; only the main thread may handle them."""
    if threading.current_thread() is not threading.main_thread():
        return ()
    endings = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return tuple(n for n in endings if signal.getsignal(n) is not signal.SIG_IGN)


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    """End the driver in order. Ray turns the status into 1 when the signal arrives inside one of its calls."""
    global _received_signal
    _received_signal = number
    raise_received_signal()


def raise_received_signal() -> None:
    """Raise what a Ctrl-C or termination signal asked for, if one has arrived; call it in every loop that waits.

    An exception raised by a signal handler is lost when the signal arrives inside a callback or a finalizer, which Ray
    runs many of. Then the driver would wait for its workers for ever.
    """
    if _received_signal == signal.SIGINT:
        raise KeyboardInterrupt
    if _received_signal is not None:
        raise SystemExit(128 + _received_signal)


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Ignore Ctrl-C and termination while the cluster is taken down; that takes seconds and must not stop halfway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
