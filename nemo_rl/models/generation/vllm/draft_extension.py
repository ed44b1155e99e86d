"""Calls what a draft brings along to be served where vLLM has no path for it.

The draft's side names a function by "module:function"; this side knows nothing else about it. It runs in every process
of the engine before that process builds anything.
"""

from __future__ import annotations

from importlib import import_module


def install_draft_extension(path: str | None) -> None:
    """Import and call the function at `path`; None does nothing.

    Args:
        path: "package.module:function", a function without arguments that may be called again.
    """
    if path is not None:
        module, _, function = path.partition(":")
        getattr(import_module(module), function)()
