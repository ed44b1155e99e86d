from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from nemo_rl.errors import RefitError
from nemo_rl.models.generation.interfaces import UpdateReport
from nemo_rl.weight_sync.interfaces import RefitManifest, RefitPayload, TensorInfo
from nemo_rl.weight_sync.synchronizer import WeightSynchronizer

MANIFEST = RefitManifest(policy={"a": TensorInfo((1,), "float32")}, draft={"b": TensorInfo((2,), "float32")})


@dataclass
class Source:
    """The one call of the policy that a refit makes."""

    sent_version: int | None = None

    def weights_ref(self, version: int, *, draft_only: bool = False) -> RefitPayload:
        manifest = RefitManifest(policy={}, draft=MANIFEST.draft, draft_only=True) if draft_only else MANIFEST
        return RefitPayload(self.sent_version or version, manifest, {"a": "1", "draft.b": "2"}, {})


@dataclass
class Sink:
    """The one call of generation that a refit makes."""

    unchecked: tuple[str, ...] = ()
    error: RefitError | None = None
    applied: list[int] = field(default_factory=list)

    def update_weights(self, payload: RefitPayload) -> UpdateReport:
        if self.error:
            raise self.error
        self.applied.append(payload.version)
        total = len(payload.manifest.wire_entries())
        return UpdateReport(payload.version, total - len(self.unchecked), self.unchecked)


def test_a_complete_update_is_verified() -> None:
    sync = WeightSynchronizer(Source(), Sink())
    report = sync.sync(0)
    assert (report.version, report.verified, report.num_tensors, report.num_checked) == (0, True, 2, 2)
    assert sync.sync(3).version == sync.version == 3


def test_a_tensor_that_cannot_be_read_back_is_not_called_verified() -> None:
    report = WeightSynchronizer(Source(), Sink(unchecked=("draft.b",))).sync(1)
    assert not report.verified
    assert report.unchecked == ("draft.b",)


def test_the_draft_can_go_alone() -> None:
    sync = WeightSynchronizer(Source(), Sink())
    assert sync.sync(0).num_tensors == 2
    report = sync.sync(1, draft_only=True)
    assert (report.version, report.verified, report.num_tensors) == (1, True, 1)


def test_versions_only_grow() -> None:
    sink = Sink()
    sync = WeightSynchronizer(Source(), sink)
    sync.sync(3)
    for stale in (3, 2):
        with pytest.raises(RefitError, match=f"got version {stale}; must exceed 3"):
            sync.sync(stale)
    assert sink.applied == [3]


def test_a_payload_of_another_version_is_not_applied() -> None:
    sink = Sink()
    with pytest.raises(RefitError, match="sent version 7 when asked for 1"):
        WeightSynchronizer(Source(sent_version=7), sink).sync(1)
    assert sink.applied == []


def test_a_refused_update_keeps_the_old_version() -> None:
    sync = WeightSynchronizer(Source(), Sink(error=RefitError("refused")))
    with pytest.raises(RefitError, match="refused"):
        sync.sync(1)
    assert sync.version == -1
