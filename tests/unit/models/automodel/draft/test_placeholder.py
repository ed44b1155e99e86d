"""The token whose embedding stands for tokens not known yet must be one that never occurs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.errors import ConfigError
from nemo_rl.models.automodel.draft.registry import MASK_EMBEDDING_FILE, resolve_spec
from tests.tiny_models import write_tiny_policy
from tests.unit.models.automodel.draft.algorithms import ALGORITHMS, MASK_TOKEN, SETTINGS, K, config_for

WITH_PLACEHOLDER = [algo for algo in ALGORITHMS if "mask_token_id" in SETTINGS[algo]]


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_tiny_policy(tmp_path_factory.mktemp("policy")))


def resolve(policy_dir: Path, algo: str, *, vocab_ids: list[int] | None = None, **changes: Any) -> Any:
    return resolve_spec(
        config_for(algo, **changes),
        policy_config=json.loads((policy_dir / "config.json").read_text()),
        k=K,
        max_model_len=64,
        dtype="float32",
        vocab_ids=vocab_ids,
        tokenizer_dir=policy_dir,
    )


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_an_unused_id_is_taken(policy_dir: Path, algo: str) -> None:
    expected = MASK_TOKEN if algo in WITH_PLACEHOLDER else None
    assert resolve(policy_dir, algo).architecture.placeholder_id == expected


@pytest.mark.parametrize("algo", WITH_PLACEHOLDER)
def test_a_token_of_the_tokenizer_is_refused(policy_dir: Path, algo: str) -> None:
    with pytest.raises(ConfigError, match=r"mask_token_id: got 65, which is the token 'b' .* e\.g\. 319"):
        resolve(policy_dir, algo, mask_token_id=65)


@pytest.mark.parametrize("algo", WITH_PLACEHOLDER)
def test_an_id_that_the_draft_proposes_is_refused(policy_dir: Path, algo: str) -> None:
    with pytest.raises(ConfigError, match="got 319, which is one of the ids that the draft proposes"):
        resolve(policy_dir, algo, draft_vocab_size=3, vocab_ids=[5, 9, MASK_TOKEN])


def test_a_replaced_mask_embedding_is_refused(policy_dir: Path, tmp_path: Path) -> None:
    (tmp_path / MASK_EMBEDDING_FILE).touch()
    with pytest.raises(ConfigError, match=rf"{MASK_EMBEDDING_FILE}: replaces the placeholder's embedding"):
        resolve(policy_dir, "dflash", model_name=str(tmp_path))
