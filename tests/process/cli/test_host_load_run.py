"""The processor time of a whole Orca beside its ranks, counted while it runs."""

from dataclasses import replace
from pathlib import Path

import pytest

from orca.bench.parts.tiny_model import write_tiny_model
from orca.cli.host_load import HostLoadFailed, measure_host_load
from orca.cli.small_model import small_model_folder
from orca.core.domain.model import load_model_info
from orca.planner.profile.measuring.model_key import profile_key

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
def test_each_part_of_a_running_service_takes_time() -> None:
    model = small_model_folder()
    key = profile_key(load_model_info(model), device="cpu", threads=1, ranks=(1,), devices=2, release="test")
    said: list[str] = []
    load = measure_host_load(model, key, seconds=1.5, report=said.append)
    assert load.service.us(8, 1) > 0
    assert load.controller.us(8, 1) > 0
    assert said == ["the rest of Orca beside the ranks"]


def test_a_service_that_cannot_start_is_reported_with_its_last_words(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    key = profile_key(load_model_info(model), device="cpu", threads=1, ranks=(1,), devices=2, release="test")
    (model / "config.json").unlink()
    with pytest.raises(HostLoadFailed, match=r"`orca up` did not become ready: .*config\.json"):
        measure_host_load(model, replace(key, devices=1), seconds=1, report=lambda _: None)
