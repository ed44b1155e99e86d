"""Exception types of nemo_rl and the process exit codes that they stand for.

Every type is also a standard-library error, so code that does not know this package can still catch it. A message
follows one template: key, got, allowed, remedy, e.g.
``policy.draft.num_layers: got 0; must be >= 1. Set it to the number of decoder layers of the draft.``
"""

from __future__ import annotations

from typing import ClassVar


class NemoRLError(Exception):
    """Base of every error that nemo_rl raises on purpose."""

    exit_code: ClassVar[int] = 1
    """Exit status of a command that ends with this error."""


class ConfigError(NemoRLError, ValueError):
    """The configuration, or a file that it names, cannot be used; found before anything starts, or while it starts."""

    exit_code: ClassVar[int] = 2


class CheckpointError(NemoRLError, RuntimeError):
    """A checkpoint could not be written, found or read."""


class RefitError(NemoRLError, RuntimeError):
    """Weights could not be handed to the generation engines as one verified update."""


class WorkerError(NemoRLError, RuntimeError):
    """A worker process died or raised; the message names the group, the rank and the remote traceback."""


class NonFiniteError(NemoRLError, RuntimeError):
    """The loss or a gradient was not finite more often in a row than the configuration allows."""


class SamplingCheckError(NemoRLError, RuntimeError):
    """A generation engine draws tokens from another distribution than its own probabilities say."""
