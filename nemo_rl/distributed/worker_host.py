"""The actor around each worker: builds it in its own process and turns what it raises into text that always travels."""

from __future__ import annotations

import importlib
import os
import pickle
import traceback
from typing import Any

import ray

from nemo_rl.errors import NemoRLError


class RemoteFailure(Exception):
    """What a worker raised, in a form that any process can read."""

    def __init__(self, kind: str, message: str, traceback_text: str, cause: NemoRLError | None) -> None:
        super().__init__(kind, message, traceback_text, cause)
        self.kind = kind
        self.message = message
        self.traceback_text = traceback_text
        self.cause = cause

    @classmethod
    def of(cls, err: BaseException) -> RemoteFailure:
        """Describe an exception; one of ours goes along itself when it survives pickling."""
        text = "".join(traceback.format_exception(err))
        return cls(type(err).__qualname__, str(err), text, _portable(err))


class WorkerHost:
    """Ray actor. Imports the worker's class by name, so neither the driver nor Ray needs its libraries."""

    def __init__(self) -> None:
        self._worker: Any = None
        self._build_failure: RemoteFailure | None = None

    def pid(self) -> int:
        """Process id of the worker."""
        return os.getpid()

    def node_ip(self) -> str:
        """Address of the worker's node."""
        return ray.util.get_node_ip_address()

    def build(self, cls_path: str, master_addr: str, init_args: tuple, init_kwargs: dict[str, Any]) -> None:
        """Import and construct the worker; ``MASTER_ADDR`` is set before its module is imported."""
        os.environ["MASTER_ADDR"] = master_addr
        try:
            self._worker = resolve_class(cls_path)(*init_args, **init_kwargs)
        except Exception as err:  # noqa: BLE001  a process boundary
            self._build_failure = RemoteFailure.of(err)
            raise self._build_failure from None

    def call(self, worker_method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the worker."""
        if self._worker is None:
            raise self._build_failure or RemoteFailure("RuntimeError", "the worker was not built", "", None)
        try:
            return getattr(self._worker, worker_method)(*args, **kwargs)
        except Exception as err:  # noqa: BLE001  a process boundary
            raise RemoteFailure.of(err) from None

    def close(self) -> None:
        """Let the worker end its own affairs, if it has a ``shutdown`` method."""
        if hasattr(self._worker, "shutdown"):
            self._worker.shutdown()


def resolve_class(cls_path: str) -> type:
    """Import "package.module:Class" (or "package.module.Class")."""
    module, _, name = cls_path.partition(":") if ":" in cls_path else cls_path.rpartition(".")
    if not module or not name:
        raise ValueError(f"worker class: got {cls_path!r}; must be 'package.module:Class'.")
    return getattr(importlib.import_module(module), name)


def _portable(err: BaseException) -> NemoRLError | None:
    if not isinstance(err, NemoRLError):
        return None
    try:
        return pickle.loads(pickle.dumps(err))
    except Exception:  # noqa: BLE001  any constructor may refuse; the text goes along anyway
        return None
