"""The checker's own grammars: what a pattern allows is what its regular expression says of the text."""

import random
import re
from pathlib import Path

import pytest

from checker.clients.digit_pattern import DigitPattern
from checker.clients.workload import chain, with_patterns
from checker.oracles.chain_model import make_chain_model
from checker.oracles.chain_oracle import expected_tokens
from checker.oracles.model_folder import text_of

PATTERN = DigitPattern(("13", "02468", "79"), 2, 4)
EOS, VOCAB = 999, 1000


def test_a_pattern_is_read_from_its_regular_expression() -> None:
    assert PATTERN.regex == "(<[0-9]*[13]><[0-9]*[02468]><[0-9]*[79]>){2,4}"
    assert DigitPattern.parse(PATTERN.regex) == PATTERN
    for fields in with_patterns(chain("m", VOCAB), seed=3).constraints:
        regex = fields["structured_outputs"]["regex"]
        assert DigitPattern.parse(regex).regex == regex


@pytest.mark.parametrize("regex", ["", "<[0-9]*[13]>", "(<[0-9]*[13]>){2}", "(<[0-9]*[13]>){2,4}x"])
def test_another_expression_is_no_pattern(regex: str) -> None:
    with pytest.raises(ValueError, match="not a pattern of digits"):
        DigitPattern.parse(regex)


@pytest.mark.parametrize("seed", range(20))
def test_candidates_lead_to_texts_of_the_expression_and_to_no_other(seed: int) -> None:
    chance, output = random.Random(seed), list[int]()
    for index in range(len(PATTERN.digits) * PATTERN.most + 1):
        candidates = PATTERN.candidates(index, range(VOCAB), EOS)
        may_end = EOS in candidates
        assert may_end == (re.fullmatch(PATTERN.regex, text_of(output)) is not None)
        if candidates == [EOS]:
            break
        output.append(chance.choice([token for token in candidates if token != EOS]))
    assert re.fullmatch(PATTERN.regex, text_of(output))
    assert PATTERN.candidates(len(output), range(VOCAB), EOS) == [EOS]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_output_of_the_oracle_matches_its_pattern_and_ends(tmp_path: Path, temperature: float) -> None:
    model = make_chain_model(tmp_path, eos_token_id=EOS)
    output = expected_tokens(model, [3, 1, 4], 50, seed=7, temperature=temperature, pattern=PATTERN)
    assert output[-1] == EOS
    assert re.fullmatch(PATTERN.regex, text_of(output[:-1]))
