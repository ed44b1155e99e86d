from __future__ import annotations

import os

os.environ.setdefault(
    "HF_HUB_OFFLINE", "1"
)  # before `datasets` or `transformers` is imported: nothing here may wait for a hub

from pathlib import Path

import pytest

from tests.tiny_models import write_tiny_policy


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_policy(tmp_path_factory.mktemp("tiny"), layers=2)


@pytest.fixture(scope="session")
def tokenizer(tiny_dir: Path):
    from nemo_rl.data.tokenizer import load_tokenizer
    from nemo_rl.models.policy.config import TokenizerConfig

    return load_tokenizer(TokenizerConfig(name=str(tiny_dir)))
