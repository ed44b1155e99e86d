"""Output directories of a run."""

from __future__ import annotations

import tempfile
from pathlib import Path

from nemo_rl.errors import ConfigError


def make_output_dir(directory: Path, *, key: str) -> None:
    """Create a directory and check that files can be made in it.

    Args:
        directory: The directory; parents are made too.
        key: Configuration key that names it.

    Raises:
        ConfigError: It cannot be made or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):  # has no name where the system allows: nothing to leave behind
            pass
    except OSError as err:
        raise ConfigError(
            f"{key}: got {str(directory)!r}; must be a directory that can be written ({err.strerror}). "
            "Name another directory, or change its permissions."
        ) from err
