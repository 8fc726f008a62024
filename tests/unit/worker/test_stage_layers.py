"""worker.parallel.stage_layers: the setting --layers divides all layers over all stages, or is refused."""

import pytest

from orca.core.domain.errors import BadValue
from orca.worker.parallel.stage_layers import read_layers


@pytest.mark.parametrize(
    ("text", "counts"), [("10,6,8", (10, 6, 8)), ("8, 8, 8", (8, 8, 8)), ("22,1,1", (22, 1, 1)), ("1,1,22", (1, 1, 22))]
)
def test_any_division_with_a_layer_for_each_stage_is_read(text: str, counts: tuple[int, ...]) -> None:
    assert read_layers(text, stages=3, num_layers=24) == counts


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("10,x,8", "is not a comma-separated list of whole numbers"),
        ("10,,14", "is not a comma-separated list of whole numbers"),
        ("", "is not a comma-separated list of whole numbers"),
        ("8.0,8,8", "is not a comma-separated list of whole numbers"),
        ("8;8;8", "is not a comma-separated list of whole numbers"),
        ("24", "has 1 number"),
        ("10,14", "has 2 numbers"),
        ("6,6,6,6", "has 4 numbers"),
        ("12,0,12", "gives 0 layers to a stage"),
        ("-1,13,12", "gives -1 layers to a stage"),
        ("10,6,9", "adds up to 25"),
        ("1,1,1", "adds up to 3"),
    ],
)
def test_what_is_no_division_is_refused_with_flag_value_and_layers(text: str, complaint: str) -> None:
    with pytest.raises(BadValue) as refused:
        read_layers(text, stages=3, num_layers=24)
    rule = "divide the model's 24 layers over 3 stages, at least one for each"
    assert str(refused.value) == f"setting --layers: '{text}' {complaint}: {rule}"
