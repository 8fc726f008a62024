"""The encoder-decoder model that checks the server: its folder and its numbers, made once for all tests."""

from pathlib import Path

import pytest
import torch

from checker.oracles.seq2seq_chain_model import Seq2SeqChainModel, load_seq2seq_chain_model, make_seq2seq_chain_model
from checker.oracles.seq2seq_chain_oracle import expected_answer
from support.worker.stage_driver import Ask

VOCAB = 1000


@pytest.fixture(scope="session")
def chain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that no test changes."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("seq2seq-chain")
    make_seq2seq_chain_model(folder)
    return folder


@pytest.fixture(scope="session")
def chain_model(chain_folder: Path) -> Seq2SeqChainModel:
    return load_seq2seq_chain_model(chain_folder)


def expected(model: Seq2SeqChainModel, ask: Ask) -> list[int]:
    """The tokens of the oracle."""
    params = ask.params
    return expected_answer(
        model,
        ask.prompt,
        ask.max_new_tokens,
        seed=params.seed,
        temperature=params.temperature,
        prefix=ask.decoder_prefix,
    )
