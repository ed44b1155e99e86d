"""Engines shared by the tests of this directory, built inside the test process."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

# Read when vllm is imported.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.config import GenerationConfig, SamplingCheckConfig, VllmConfig
from nemo_rl.models.generation.interfaces import UpdateReport
from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorker
from tests.unit.models.generation.vllm import counting_models as counting

_NEEDS_ENGINE = {"served", "reference_model"}
STOP_TOKEN = 300
MAX_LEN = 96


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and _NEEDS_ENGINE & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.vllm)


@dataclasses.dataclass
class Served:
    """An engine and the weights that it was given last."""

    worker: VllmGenerationWorker
    policy_dir: Path
    draft_dir: Path
    policy: counting.Weights
    draft: counting.Weights
    version: int = -1

    def update(self, policy: counting.Weights, draft: counting.Weights) -> UpdateReport:
        report = self.worker.update_weights(counting.make_payload(self.version + 1, policy, draft))
        self.version, self.policy, self.draft = report.version, policy, draft
        return report


def generation_config(**overrides: object) -> GenerationConfig:
    values = {
        "max_new_tokens": 32,
        "temperature": 1.3,
        "stop_token_ids": (STOP_TOKEN,),
        "vllm_cfg": VllmConfig(precision="float32", max_model_len=MAX_LEN),
        "sampling_check": SamplingCheckConfig(),
        "vllm_kwargs": {},
    }
    return GenerationConfig(**{**values, **overrides})


def make_worker(policy_dir: Path, config: GenerationConfig) -> VllmGenerationWorker:
    return VllmGenerationWorker(config, model_dir=str(policy_dir), tokenizer_dir=str(policy_dir), device="cpu", seed=0)


def prompts(count: int, *, seed: int = 0, low: int = 4, high: int = 20) -> BatchedDataDict:
    """Random prompts of unequal lengths, right padded, with one seed per row."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (count,), generator=generator)
    ids = torch.randint(0, 250, (count, high), generator=generator)
    return BatchedDataDict({"input_ids": ids, "input_lengths": lengths, "seeds": torch.arange(count) + 1000 * seed})


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("counting")
    policy = counting.write_counting_policy(root / "policy")
    # The draft starts with the policy's head, as training from scratch does: vLLM would share the two.
    counting.write_counting_draft(root / "draft", root / "policy", head=policy["lm_head.weight"])
    return root / "policy", root / "draft"


@pytest.fixture(scope="session")
def served(model_dirs: tuple[Path, Path]) -> Iterator[Served]:
    """A speculative engine (K=3, temperature 1.3) that holds the counting policy and the counting draft."""
    policy_dir, draft_dir = model_dirs
    worker = make_worker(policy_dir, generation_config(stop_strings=("<never>",), vllm_kwargs={"block_size": 32}))
    from safetensors.torch import load_file

    policy = load_file(str(policy_dir / "model.safetensors"))
    draft = counting.write_counting_draft(draft_dir.parent / "counting_draft", policy_dir)
    worker.preload()
    worker.build(speculative_config=counting.speculative_config(draft_dir), trained_draft_tensors=tuple(draft))
    served = Served(worker, policy_dir, draft_dir, policy, draft)
    served.update(policy, draft)
    yield served
    worker.shutdown()


@pytest.fixture(scope="session")
def reference_model(model_dirs: tuple[Path, Path]):
    """The counting policy in transformers, float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dirs[0], dtype=torch.float32, attn_implementation="eager").eval()
