"""Files of lengths are read in four forms; every line that is not understood is refused with its number."""

from pathlib import Path

import pytest

from orca.core.domain.errors import SettingError
from orca.planner.workload.lengths_file import read_workload

GOOD = {
    "csv": "prompt,output\n5,7\n9,2\n",
    "csv with other columns": "id, output ,prompt\r\na,7,5\r\nb,2,9\r\n\r\n",
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,5,7\n2023-11-16 18:17:04.03,9,2",
    "json lines": '{"prompt_tokens": 5, "output_tokens": 7}\n\n{"prompt_tokens": 9, "output_tokens": 2}\n',
    "mooncake": '{"timestamp": 0, "input_length": 5, "output_length": 7, "hash_ids": [0]}\n'
    '{"timestamp": 9, "input_length": 9, "output_length": 2, "hash_ids": [1]}',
}


@pytest.mark.parametrize("form", GOOD)
def test_every_form_gives_the_same_lengths(form: str, tmp_path: Path) -> None:
    (file := tmp_path / "past").write_text(GOOD[form], encoding="utf-8-sig")
    workload = read_workload(file)
    assert sorted((part.prompts.low, part.outputs.high) for part in workload.parts) == [(5, 7), (9, 2)]
    assert (workload.answers, workload.longest, workload.source) == (2, 12, "past")


def test_lengths_are_scaled_and_stay_at_least_one(tmp_path: Path) -> None:
    (file := tmp_path / "past.csv").write_text("prompt,output\n100,1\n102,50\n")
    workload = read_workload(file, scale=0.25)
    assert sorted((part.prompts.low, part.outputs.low) for part in workload.parts) == [(25, 1), (26, 12)]
    assert workload.source == "past.csv x 0.25"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no requests"),
        ("prompt,output\n", "has no requests"),
        ("prompt,answer\n5,7\n", "line 1: the header needs the columns prompt and output, or"),
        ("prompt,output\n5,7\n5\n", "line 3: 1 values for 2 columns"),
        ("prompt,output\n5,7,8\n", "line 2: 3 values for 2 columns"),
        ("prompt,output\n5,x\n", "line 2: output tokens are a whole number, not 'x'"),
        ("prompt,output\n1.5,3\n", "line 2: prompt tokens are a whole number, not '1.5'"),
        ("prompt,output\n,3\n", "line 2: prompt tokens are a whole number, not ''"),
        ("prompt,output\n5,7\n9,0\n", "line 3: output tokens are from 1 to 2,147,483,647, not 0"),
        ("prompt,output\n-5,7\n", "line 2: prompt tokens are from 1 .* not -5"),
        (f"prompt,output\n{'9' * 12},7\n", "line 2: prompt tokens are from 1"),
        (f"prompt,output\n{'9' * 5000},7\n", "line 2: prompt tokens are a whole number"),
        ('prompt,output\n"5,7\n', "line 2: not CSV"),
        ('{"prompt_tokens": 5}\n', "line 1: an object needs prompt_tokens and output_tokens, or"),
        ('{"prompt_tokens": 5, "output_tokens": 7}\n[5, 7]\n', "line 2: not a JSON object"),
        ('{"prompt_tokens": 5, "output_tokens": 7}\n{"prompt\n', "line 2: not JSON"),
        ('{"prompt_tokens": true, "output_tokens": 7}', "line 1: prompt tokens are a whole number, not 'True'"),
        ('{"prompt_tokens": 5, "output_tokens": 7.0}', "line 1: output tokens are a whole number, not '7.0'"),
        ('{"prompt_tokens": 5, "output_tokens": null}', "line 1: output tokens are a whole number"),
        ('{"input_length": 5, "output_length": 0}', "line 1: output tokens are from 1"),
    ],
)
def test_a_bad_line_is_refused_with_file_and_number(text: str, complaint: str, tmp_path: Path) -> None:
    (file := tmp_path / "past").write_text(text)
    with pytest.raises(SettingError, match=complaint) as caught:
        read_workload(file)
    assert str(file) in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="nowhere cannot be read"):
        read_workload(tmp_path / "nowhere")
    (file := tmp_path / "past").write_bytes(b"prompt,output\n\xff,3\n")
    with pytest.raises(SettingError, match="past cannot be read"):
        read_workload(file)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_leaves_no_lengths_is_refused(scale: float, tmp_path: Path) -> None:
    (file := tmp_path / "past").write_text(GOOD["csv"])
    with pytest.raises(SettingError, match="the scale of lengths is above 0"):
        read_workload(file, scale=scale)
