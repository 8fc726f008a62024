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
from orca.bench.turns import choices, compare, hit_rate, repair
from orca.bench.turns.conversations import ConversationSpec
from orca.bench.turns.shared_trace import read_shared_trace
from orca.bench.turns.variants import MeasuredModel, check_up_options
from orca.core.domain.errors import SettingError
from orca.core.domain.model import load_model_info
from orca.planner.workload.lengths import Range

HELP = "the prefix cache: conversations, choices of one prompt, and repairs, with and without it"

SHAPES = ("llama-63m",)
SYSTEM_TOKENS = 400
QUESTION_TOKENS = ANSWER_TOKENS = Range(32, 96)
CHOICES_PROMPT = 1_000
CHOICES_NEW = 16
REPAIR_OWN = 32
REPAIR_NEW = 128
REPAIR_BEFORE = 16
TRACE_DIVISOR = 16
ONLY_WITH = {
    "kill": ("repair",),
    "prompt_tokens": ("choices", "repair"),
    "divisor": ("trace",),
    "requests": ("trace",),
    "groups": ("trace",),
}
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
    add("--system-tokens", type=positive(int), default=SYSTEM_TOKENS, metavar="N", help=system)
    uniform = "uniform from N to M"
    question = f"tokens that a turn adds, {uniform} (32:96)"
    add("--question-tokens", type=read_lengths, default=QUESTION_TOKENS, metavar="N[:M]", help=question)
    answer = f"tokens of an answer, {uniform} (32:96)"
    add("--answer-tokens", type=read_lengths, default=ANSWER_TOKENS, metavar="N[:M]", help=answer)
    add("--max-batch-size", type=positive(int), default=16, metavar="N", help="requests in a batch (%(default)s)")
    add("--rounds", type=positive(int), default=3, metavar="N", help="runs of each, in turns (%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="seed of lengths and prompts (%(default)s)")
    add("--no-shared", action="store_true", help="no two prompts begin alike: what the cache costs that finds nothing")
    instead = parser.add_mutually_exclusive_group()
    of_one = "instead: calls with one choice and with N choices"
    instead.add_argument("--choices", type=positive(int), metavar="N", help=of_one)
    instead.add_argument("--repair", action="store_true", help="instead: kill a process while requests run")
    trace = "instead: hit rates on Mooncake's public trace, simulated, for some groups and cache sizes"
    instead.add_argument("--trace", type=Path, metavar="FILE", help=trace)
    shorter = f"with --trace: divides all lengths, a divisor of 512 ({TRACE_DIVISOR})"
    add("--divisor", type=positive(int), metavar="N", help=shorter)
    add("--requests", type=positive(int), metavar="N", help="with --trace: only the first N requests (all)")
    add("--groups", type=comma_separated(positive(int)), metavar="N,M", help="with --trace: groups on one pool (1,2)")
    prompt = f"with --choices and --repair: tokens of the prompt, or of its common beginning ({CHOICES_PROMPT})"
    add("--prompt-tokens", type=positive(int), metavar="N", help=prompt)
    add("--kill", choices=repair.VICTIMS, help="with --repair: the process (worker)")
    add_output_options(parser, can_plot=False)


@dataclass(frozen=True, slots=True)
class ModelResults:
    """The results of one model."""

    lines: Sequence[str]
    content: Any
    figures: Sequence[Measured]


def act(options: argparse.Namespace, up_options: Sequence[str]) -> int | None:
    """Run the bench. Raises: SettingError, ModelError, OrcaError."""
    way = next((name for name in INSTEAD if getattr(options, name)), "turns")
    for option, ways in ONLY_WITH.items():
        if getattr(options, option) is not None and way not in ways:
            flags = " and ".join(f"--{each}" for each in ways)
            raise SettingError(f"--{option.replace('_', '-')} is for {flags}")
    if options.no_shared and way != "turns":
        raise SettingError(f"--no-shared is for conversations: leave --{way} out")
    if way == "trace":
        _trace(options, up_options)
        return None
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


def _trace(options: argparse.Namespace, up_options: Sequence[str]) -> None:
    """Print the hit rates on a trace. Raises: SettingError."""
    if up_options or options.model is not None:
        raise SettingError("--trace runs on simulated stages: leave --model and options for `orca up` out")
    trace = read_shared_trace(options.trace, divisor=options.divisor or TRACE_DIVISOR, requests_max=options.requests)
    plan = hit_rate.HitRatePlan(
        trace=trace, groups=options.groups or (1, 2), max_batch_size=options.max_batch_size, seed=options.seed
    )
    rates = hit_rate.measure_hit_rates(plan, report)
    print("\n".join(hit_rate.lines(rates)))
    write_json(options.json, hit_rate.to_json(rates))
    settings: Mapping[str, Setting] = {"trace": trace.source, "requests": len(trace.requests)}
    write_figures(options, hit_rate.figures(rates, settings), device="virtual time")


def _models(options: argparse.Namespace, up_options: Sequence[str], folder: Path) -> Iterator[MeasuredModel]:
    for model in chosen_models(options, folder):
        words = ["--max-batch-size", str(options.max_batch_size), *up_options]
        yield MeasuredModel(model, load_model_info(model).vocab_size, words)


def _turns(options: argparse.Namespace, model: MeasuredModel) -> ModelResults:
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
    return ModelResults(compare.lines(found), compare.to_json(found), compare.figures(found, settings))


def _choices(options: argparse.Namespace, model: MeasuredModel) -> ModelResults:
    plan = choices.ChoicesPlan(
        choices=options.choices,
        prompt_tokens=options.prompt_tokens or CHOICES_PROMPT,
        new_tokens=CHOICES_NEW,
        rounds=options.rounds,
        seed=options.seed,
    )
    _check_length(model, plan.prompt_tokens + plan.new_tokens)
    found = choices.measure(model, plan, report)
    return ModelResults(choices.lines(found), choices.to_json(found), choices.figures(found, {"model": model.name}))


def _repair(options: argparse.Namespace, model: MeasuredModel) -> ModelResults:
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
    return ModelResults(repair.lines(found), repair.to_json(found), repair.figures(found, settings))


def _check_length(model: MeasuredModel, tokens: int) -> None:
    """Check that a model takes the longest request. Raises: SettingError."""
    most = load_model_info(model.folder).max_model_len
    if tokens > most:
        raise SettingError(f"the longest request has {tokens} tokens, and {model.name} takes {most}")


INSTEAD = ("choices", "repair", "trace")
"""Ways to run the bench other than conversations, by the names of their options."""
WAYS: Mapping[str, Callable[[argparse.Namespace, MeasuredModel], ModelResults]] = {
    "turns": _turns,
    "choices": _choices,
    "repair": _repair,
}
"""Ways that start `orca up`."""
