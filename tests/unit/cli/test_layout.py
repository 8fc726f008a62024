"""The defaults that `orca up` chooses for the machine and the model."""

import pytest

from orca.cli.up.layout import LARGE_PARAMETERS, describe, describe_pace, with_layout
from orca.cli.up.settings import UpSettings, parse_settings

SMALL, MIDDLE, LARGE = 2_800_000, 63_200_000, 7_240_000_000


def chosen(*flags: str, parameters: int = MIDDLE, processors: int = 2) -> UpSettings:
    return with_layout(parse_settings(list(flags)), parameters=parameters, processors=processors)


@pytest.mark.parametrize(
    ("flags", "parameters", "processors", "threads"),
    [
        ("", MIDDLE, 1, 1),
        ("", MIDDLE, 2, 2),
        ("", MIDDLE, 3, 2),
        ("", LARGE, 16, 15),
        ("", SMALL, 2, 1),
        ("", SMALL, 16, 1),
        ("--stages 2", MIDDLE, 1, 1),
        ("--stages 2", MIDDLE, 2, 1),
        ("--stages 2", MIDDLE, 8, 3),
        ("--tensor 2 --replicas 2", MIDDLE, 16, 3),
        ("--stages 4", MIDDLE, 2, 1),
        ("--threads 4", MIDDLE, 2, 4),
        ("--threads 2", SMALL, 2, 2),
        ("--threads 2 --stages 2", MIDDLE, 2, 2),
    ],
)
def test_threads_of_a_rank_follow_from_the_processors(
    flags: str, parameters: int, processors: int, threads: int
) -> None:
    assert chosen(*flags.split(), parameters=parameters, processors=processors).threads == threads


@pytest.mark.parametrize("processors", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_the_total_of_threads_is_between_the_ranks_and_the_processors(processors: int, ranks: int) -> None:
    threads = ranks * chosen("--stages", str(ranks), processors=processors).threads
    assert ranks <= threads <= max(processors, ranks)


def test_there_is_one_stage_unless_more_are_asked_for() -> None:
    assert chosen(processors=64).stages == 1
    assert chosen("--stages", "3").stages == 3


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ("", 256),
        ("--max-batch-size 128", 256),
        ("--max-batch-size 256", 512),
        ("--max-batch-tokens 64", 64),
        ("--max-batch-tokens 0", None),
        ("--max-batch-tokens 0 --policy request_level", None),
        ("--policy request_level", None),
        ("--policy rra --encode-batch 4 --decode-steps 8", None),
        ("--device cuda", None),
        ("--device cuda --max-batch-tokens 4096", 4096),
    ],
)
def test_the_step_token_bound_follows_from_the_device(flags: str, tokens: int | None) -> None:
    assert chosen(*flags.split()).max_batch_tokens == tokens


@pytest.mark.parametrize(
    ("flags", "processors", "interval_ms"),
    [
        ("", 1, 50),
        ("", 2, 50),
        ("", 3, 0),
        ("--threads 3", 3, 50),
        ("--threads 2 --stages 2", 4, 50),
        ("--device cuda", 2, 0),
        ("--commit-interval-ms 0", 2, 0),
        ("--commit-interval-ms 20", 64, 20),
    ],
)
def test_commits_are_batched_if_the_other_parts_have_no_processor_of_their_own(
    flags: str, processors: int, interval_ms: int
) -> None:
    assert chosen(*flags.split(), processors=processors).commit_interval_ms == interval_ms


@pytest.mark.parametrize(
    ("flags", "processors", "parameters", "prefetch"),
    [
        ("", 2, LARGE_PARAMETERS, 0),
        ("", 2, LARGE_PARAMETERS - 1, 1),
        ("", 3, LARGE_PARAMETERS, 1),
        ("--threads 3", 3, LARGE_PARAMETERS, 0),
        ("--stages 2", 2, LARGE_PARAMETERS, 1),
        ("--device cuda", 2, LARGE_PARAMETERS, 1),
        ("--prefetch 1", 2, LARGE_PARAMETERS, 1),
        ("--prefetch 0", 64, 1, 0),
    ],
)
def test_one_batch_is_in_flight_if_long_steps_leave_the_other_parts_no_processor(
    flags: str, processors: int, parameters: int, prefetch: int
) -> None:
    assert chosen(*flags.split(), processors=processors, parameters=parameters).prefetch == prefetch


@pytest.mark.parametrize(
    ("flags", "parameters", "processors", "said"),
    [
        ("", MIDDLE, 2, "1 stage x 2 threads (63 M parameters, 2 processors)"),
        ("", LARGE, 16, "1 stage x 15 threads (7.2 B parameters, 16 processors, one of them for the other parts)"),
        ("", SMALL, 2, "1 stage x 1 thread (2.8 M parameters, too few for more threads, 2 processors)"),
        ("--stages 2", MIDDLE, 1, "2 stages x 1 thread (63 M parameters, 1 processor)"),
        (
            "--replicas 2 --tensor 2 --threads 3",
            MIDDLE,
            2,
            "2 groups x 1 stage x 2 ranks x 3 threads (63 M parameters, 2 processors, threads as asked for)",
        ),
        ("--device cuda --stages 2", LARGE, 16, "2 stages on cuda"),
        (
            "--device cuda --stages 3 --layers 10,6,8 --tensor 2",
            LARGE,
            16,
            "3 stages of 10,6,8 layers x 2 ranks on cuda",
        ),
    ],
)
def test_the_layout_is_printed_with_its_reasons(flags: str, parameters: int, processors: int, said: str) -> None:
    assert describe(parse_settings(flags.split()), parameters=parameters, processors=processors) == said


@pytest.mark.parametrize(
    ("processors", "said"), [(2, "prefetch 1, commits every 50 ms"), (3, "prefetch 1, commits at once")]
)
def test_the_pace_is_printed(processors: int, said: str) -> None:
    assert describe_pace(chosen(processors=processors)) == said
