"""`orca bench chunks`: each bound runs, gives the tokens of whole prompts, and is told with its gaps."""

from pathlib import Path

import orjson
import pytest

from orca.bench.main import main
from orca.core.domain.errors import SettingError

TRACE = ["--requests", "6", "--prompt-tokens", "20:40", "--new-tokens", "2:6", "--rounds", "1", "--batch-size", "2"]


def test_chunks_give_the_tokens_of_whole_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chunks", *TRACE, "--max-batch-tokens", "8,3", "--json", str(tmp_path / "figures.json")]) == 0
    figures = orjson.loads((tmp_path / "figures.json").read_bytes())
    assert [each["max_batch_tokens"] for each in figures] == [None, 8, 3]
    assert [each["same_tokens"] for each in figures] == [1.0, 1.0, 1.0]
    assert all(0 < each["gap_p50_s"] <= each["gap_p99_s"] <= each["longest_gap_s"] for each in figures)
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["tokens/step", "tokens/s"]
    assert [row.split()[0] for row in rows] == ["whole", "8", "3"]


def test_a_bound_that_leaves_no_room_for_a_prompt_is_refused() -> None:
    with pytest.raises(SettingError, match=r"max_batch_tokens \(2\) must be above max_batch_size \(2\)"):
        main(["chunks", *TRACE, "--max-batch-tokens", "2"])
