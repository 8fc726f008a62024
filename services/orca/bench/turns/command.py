"""`orca bench turns`: the options, and the runs with and without the prefix cache."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from orca.bench.figures.figure import Measured, Setting
from orca.bench.options import add_output_options, comma_separated, positive, read_lengths, write_figures, write_json
from orca.bench.plan.models import check_shapes, chosen_models, report
from orca.bench.turns import choices, compare, repair
from orca.bench.turns.conversations import ConversationSpec
from orca.bench.turns.variants import MeasuredModel, check_up_options
from orca.core.domain.errors import SettingError
from orca.core.domain.model import load_model_info
from orca.planner.workload.lengths import Range

HELP = "the prefix cache: conversations, choices of one prompt, and repairs, with and without it"

SHAPES = ("llama-63m",)
CHOICES_PROMPT = 1_000
CHOICES_NEW = 16
REPAIR_OWN = 32
REPAIR_NEW = 128
REPAIR_BEFORE = 16
ONLY_WITH = {"kill": ("repair",), "prompt_tokens": ("choices", "repair")}
"""Options that some ways to run the bench have alone."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    shown = f"shapes of random models, comma-separated ({','.join(SHAPES)})"
    add("--shapes", type=comma_separated(str), default=SHAPES, metavar="A,B", help=shown)
    add("--model", metavar="DIR", help="a model instead of these shapes")
    held = "conversations side by side; with --repair requests (%(default)s)"
    add("--conversations", type=positive(int), default=16, metavar="N", help=held)
    add("--turns", type=positive(int), default=8, metavar="N", help="turns of a conversation (%(default)s)")
    system = "tokens that all conversations begin with (%(default)s)"
    add("--system-tokens", type=positive(int), default=400, metavar="N", help=system)
    uniform = "uniform from N to M"
    question = f"tokens that a turn adds, {uniform} (32:96)"
    add("--question-tokens", type=read_lengths, default=Range(32, 96), metavar="N[:M]", help=question)
    answer = f"tokens of an answer, {uniform} (32:96)"
    add("--answer-tokens", type=read_lengths, default=Range(32, 96), metavar="N[:M]", help=answer)
    add("--max-batch-size", type=positive(int), default=16, metavar="N", help="requests in a batch (%(default)s)")
    add("--rounds", type=positive(int), default=3, metavar="N", help="runs of each, in turns (%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="seed of lengths and prompts (%(default)s)")
    add("--no-shared", action="store_true", help="no two prompts begin alike: what the cache costs that finds nothing")
    instead = parser.add_mutually_exclusive_group()
    of_one = "instead: calls with one choice and with N choices"
    instead.add_argument("--choices", type=positive(int), metavar="N", help=of_one)
    instead.add_argument("--repair", action="store_true", help="instead: kill a process while requests run")
    prompt = f"with --choices and --repair: tokens of the prompt, or of its common beginning ({CHOICES_PROMPT})"
    add("--prompt-tokens", type=positive(int), metavar="N", help=prompt)
    add("--kill", choices=repair.VICTIMS, help="with --repair: the process (worker)")
    add_output_options(parser, can_plot=False)


@dataclass(frozen=True, slots=True)
class Results:
    """The results of one model."""

    lines: Sequence[str]
    content: Any
    figures: Sequence[Measured]


def act(options: argparse.Namespace, up_options: Sequence[str]) -> int | None:
    """Run the bench. Raises: SettingError, ModelError, OrcaError."""
    way = "repair" if options.repair else "choices" if options.choices is not None else "turns"
    for option, ways in ONLY_WITH.items():
        if getattr(options, option) is not None and way not in ways:
            flags = " and ".join(f"--{each}" for each in ways)
            raise SettingError(f"--{option.replace('_', '-')} is for {flags}")
    if options.no_shared and way != "turns":
        raise SettingError(f"--no-shared is for conversations: leave --{way} out")
    check_up_options(up_options)
    check_shapes(options)
    content: dict[str, Any] = {}
    found: list[Measured] = []
    with TemporaryDirectory(prefix="orca-turns-") as folder:
        for model in _models(options, up_options, Path(folder)):
            results = WAYS[way](options, model)
            print(model.name)
            print("\n".join(results.lines))
            content[model.name] = results.content
            found += results.figures
    write_json(options.json, content)
    write_figures(options, found)
    return None


def _models(options: argparse.Namespace, up_options: Sequence[str], folder: Path) -> Iterator[MeasuredModel]:
    for model in chosen_models(options, folder):
        words = ["--max-batch-size", str(options.max_batch_size), *up_options]
        yield MeasuredModel(model, load_model_info(model).vocab_size, words)


def _turns(options: argparse.Namespace, model: MeasuredModel) -> Results:
    spec = ConversationSpec(
        conversations=options.conversations,
        turns=options.turns,
        system_tokens=options.system_tokens,
        question_tokens=options.question_tokens,
        answer_tokens=options.answer_tokens,
        seed=options.seed,
        is_shared=not options.no_shared,
    )
    _check_length(model, spec.longest)
    found = compare.compare(model, spec, options.rounds, report)
    settings = {
        "model": model.name,
        "prompts": "all different" if options.no_shared else "shared",
        "conversations": options.conversations,
        "system_tokens": options.system_tokens,
        "question": str(options.question_tokens),
        "answer": str(options.answer_tokens),
    }
    return Results(compare.lines(found), compare.to_json(found), compare.figures(found, settings))


def _choices(options: argparse.Namespace, model: MeasuredModel) -> Results:
    plan = choices.ChoicesPlan(
        choices=options.choices,
        prompt_tokens=options.prompt_tokens or CHOICES_PROMPT,
        new_tokens=CHOICES_NEW,
        rounds=options.rounds,
        seed=options.seed,
    )
    _check_length(model, plan.prompt_tokens + plan.new_tokens)
    found = choices.measure(model, plan, report)
    return Results(choices.lines(found), choices.to_json(found), choices.figures(found, {"model": model.name}))


def _repair(options: argparse.Namespace, model: MeasuredModel) -> Results:
    plan = repair.RepairPlan(
        requests=options.conversations,
        shared_tokens=options.prompt_tokens or CHOICES_PROMPT,
        own_tokens=REPAIR_OWN,
        new_tokens=REPAIR_NEW,
        tokens_before=REPAIR_BEFORE,
        victim=options.kill or repair.VICTIMS[0],
        rounds=options.rounds,
        seed=options.seed,
    )
    _check_length(model, plan.shared_tokens + plan.own_tokens + plan.new_tokens)
    found = repair.measure(model, plan, report)
    settings: Mapping[str, Setting] = {
        "model": model.name,
        "requests": plan.requests,
        "prompt_tokens": plan.shared_tokens,
        "killed": plan.victim,
    }
    return Results(repair.lines(found), repair.to_json(found), repair.figures(found, settings))


def _check_length(model: MeasuredModel, tokens: int) -> None:
    """Check that a model takes the longest request. Raises: SettingError."""
    most = load_model_info(model.folder).max_model_len
    if tokens > most:
        raise SettingError(f"the longest request has {tokens} tokens, and {model.name} takes {most}")


WAYS: Mapping[str, Callable[[argparse.Namespace, MeasuredModel], Results]] = {
    "turns": _turns,
    "choices": _choices,
    "repair": _repair,
}
"""Ways to run the bench."""
