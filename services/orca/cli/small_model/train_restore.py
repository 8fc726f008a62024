"""Train the second small model that ships with Orca: a T5 that restores case and punctuation.

The text is that of the first small model (see novels.py). Neither its package nor R needs to be installed:

    apt-get download r-cran-janeaustenr && dpkg -x r-cran-janeaustenr_*.deb austen
    python -m orca.cli.small_model.train_restore --package austen --checkpoint restore.pt \
        --out services/orca/cli/small_model/orca-restore

It computes with one thread: with the same seed and steps, the same machine writes the same weights again, also if an
interrupted training goes on with --resume. More steps may be asked for until the last part of them has begun.
"""

import argparse
import copy
import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5DenseGatedActDense

from orca.cli.small_model.cased_tokenizer import END, END_ID, PAD, PAD_ID, VOCABULARY_MIN, learn_tokenizer
from orca.cli.small_model.copying import begin_as_copier, first_embeddings
from orca.cli.small_model.novels import chapters_of, read_novels
from orca.cli.small_model.restoring import WORDS_MAX, Example, Restored, compare, examples_of

STEPS = 1580
# What a training that goes on has in common with the one that wrote the checkpoint.
KEPT_SETTINGS = (
    "seed", "vocabulary", "width", "heads", "encoder_layers", "decoder_layers", "tokens", "rate", "embedding_rate"
)  # fmt: skip
HELD_OUT = 20  # one chapter in 20 is held out for the figures that the model card quotes
IGNORED = -100  # label of padding, which cross entropy leaves out
POOL = 2048  # examples that are sorted by length together, so that a batch has little padding


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The length and learning rates of the training. All but the last part is the same for any number of steps."""

    steps: int
    tokens: int  # padded tokens of sources and targets in a step
    rate: float  # learning rate of the matrices
    embedding_rate: float  # learning rate of the embeddings, whose values are larger
    warmup: int = 100  # steps
    cooldown: float = 0.3  # the last part of the steps, in which the rate falls to zero

    def rate_fraction(self, step: int) -> float:
        """Return the fraction of the full rate at `step`: a linear warm-up, a plateau, and a linear descent."""
        return min(1.0, (step + 1) / self.warmup, (self.steps - step) / (self.cooldown * self.steps))


@dataclass(frozen=True, slots=True)
class PaddedExamples:
    """Padded examples: token ids of the sources and labels of the targets, both [examples, tokens]."""

    sources: torch.Tensor
    labels: torch.Tensor


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    chapters = [chapter for novel in read_novels(options.package) for chapter in chapters_of(novel)]
    random.Random(options.seed).shuffle(chapters)
    learned = [chapter for place, chapter in enumerate(chapters) if place % HELD_OUT]
    held_out = list(examples_of(chapters[::HELD_OUT], words_max=WORDS_MAX, draw=random.Random(options.seed)))
    tokenizer = learn_tokenizer(tokenizer_texts(learned), options.vocabulary)
    model = T5ForConditionalGeneration(configuration(options, tokenizer.get_vocab_size()))
    for module in model.modules():
        if isinstance(module, T5DenseGatedActDense):
            module.act = torch.nn.GELU(approximate="tanh")  # gelu_new in one operation instead of eight
    begin_as_copier(model, first_embeddings(tokenizer, model.config.d_model // 2))
    print(
        f"{len(chapters)} chapters, {len(held_out)} examples held out, {model.num_parameters()} parameters", flush=True
    )

    schedule = Schedule(
        steps=options.steps,
        tokens=options.tokens,
        rate=options.rate,
        embedding_rate=options.embedding_rate,
    )
    settings = {name: getattr(options, name) for name in KEPT_SETTINGS}
    training = Training(model, tokenizer, schedule, settings)
    if options.resume:
        training.resume(options.checkpoint)
    batches = batches_of(learned, tokenizer, schedule.tokens, options.seed)
    for batch in itertools.islice(batches, training.step, schedule.steps):
        training.learn(batch)
        if training.step % options.report_steps == 0 or training.step == schedule.steps:
            print(training.report(held_out), flush=True)
            training.store(options.checkpoint)
    save(model, tokenizer, options.out)
    print(json.dumps({**figures_of(model, tokenizer, held_out), "seconds": round(training.seconds)}))


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--package", type=Path, required=True, help="folder with the unpacked r-cran-janeaustenr")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--checkpoint", type=Path, required=True, help="file that keeps the state of the training")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--tokens", type=int, default=2048, help="padded tokens of sources and targets in a step")
    parser.add_argument("--rate", type=float, default=0.001)
    parser.add_argument("--embedding-rate", type=float, default=0.004)
    parser.add_argument("--report-steps", type=int, default=100, help="steps between two reports and checkpoints")
    parser.add_argument("--vocabulary", type=int, default=2048, help="token ids at most")
    parser.add_argument("--width", type=int, default=192, help="d_model; d_ff is twice as large")
    parser.add_argument("--heads", type=int, default=6, help="an even number that divides --width")
    parser.add_argument("--encoder-layers", type=int, default=4)
    parser.add_argument("--decoder-layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1775)
    options = parser.parse_args(arguments)
    for name in ("steps", "tokens", "report_steps", "width", "heads", "encoder_layers", "decoder_layers"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: must be at least 1, not {getattr(options, name)}")
    if options.heads % 2 or options.width % options.heads:
        parser.error(f"--heads: must be an even number that divides --width {options.width}, not {options.heads}")
    if options.vocabulary < VOCABULARY_MIN:
        parser.error(
            f"--vocabulary: must be at least {VOCABULARY_MIN}, not {options.vocabulary}: each byte has a token"
        )
    if not options.checkpoint.parent.is_dir():
        parser.error(f"--checkpoint: there is no folder {options.checkpoint.parent}. Create it")
    if options.resume and not options.checkpoint.is_file():
        parser.error(f"--resume: there is no checkpoint {options.checkpoint}. Start without --resume")
    return options


def tokenizer_texts(chapters: list[list[str]]) -> Iterator[str]:
    """Yield the sources and the lower-case targets that the tokenizer learns from."""
    for example in examples_of(chapters, words_max=WORDS_MAX, draw=random.Random(0)):
        yield example.source
        yield example.target.lower()


def configuration(options: argparse.Namespace, vocabulary: int) -> T5Config:
    """Return a T5 1.1 with tied embeddings. By default 1, 2, 3 or 6 stages and 1, 2, 3 or 6 ranks divide it."""
    shape: dict[str, Any] = {
        "vocab_size": vocabulary,
        "d_model": options.width,
        "d_kv": options.width // options.heads,
        "num_heads": options.heads,
        "d_ff": 2 * options.width,
        "num_layers": options.encoder_layers,
        "num_decoder_layers": options.decoder_layers,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": True,
        "dropout_rate": 0.0,
        "pad_token_id": PAD_ID,
        "eos_token_id": END_ID,
        "decoder_start_token_id": PAD_ID,
    }
    return T5Config(**shape)


def batches_of(chapters: list[list[str]], tokenizer: Tokenizer, tokens_max: int, seed: int) -> Iterator[PaddedExamples]:
    """Yield batches without end: each pass over the chapters cuts other windows and draws another order."""
    draw = random.Random(seed)
    while True:
        examples = list(examples_of(chapters, words_max=WORDS_MAX, draw=draw))
        draw.shuffle(examples)
        batches = [
            batch
            for first in range(0, len(examples), POOL)
            for batch in cut_by_tokens(encode(tokenizer, examples[first : first + POOL]), tokens_max)
        ]
        draw.shuffle(batches)
        yield from map(padded, batches)


def encode(tokenizer: Tokenizer, examples: Sequence[Example]) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of each example's source and target, both with END."""
    sources = tokenizer.encode_batch([example.source for example in examples])
    targets = tokenizer.encode_batch([example.target for example in examples])
    return [(source.ids, target.ids) for source, target in zip(sources, targets, strict=True)]


def cut_by_tokens(
    pairs: list[tuple[list[int], list[int]]], tokens_max: int
) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Yield the pairs in batches of similar length, each of at most `tokens_max` padded tokens or of one pair."""
    batch: list[tuple[list[int], list[int]]] = []
    longest = 0
    for pair in sorted(pairs, key=lambda pair: len(pair[0]) + len(pair[1])):
        longest = max(longest, len(pair[0]) + len(pair[1]))
        if batch and longest * (len(batch) + 1) > tokens_max:
            yield batch
            batch, longest = [], len(pair[0]) + len(pair[1])
        batch.append(pair)
    if batch:
        yield batch


def padded(pairs: list[tuple[list[int], list[int]]]) -> PaddedExamples:
    """Return the pairs as tensors."""
    sources = [torch.tensor(source) for source, _ in pairs]
    labels = [torch.tensor(target) for _, target in pairs]
    pad = torch.nn.utils.rnn.pad_sequence
    return PaddedExamples(
        pad(sources, batch_first=True, padding_value=PAD_ID), pad(labels, batch_first=True, padding_value=IGNORED)
    )


class Training:
    """A model, its optimizer and the steps done, which a checkpoint keeps."""

    def __init__(
        self,
        model: T5ForConditionalGeneration,
        tokenizer: Tokenizer,
        schedule: Schedule,
        settings: dict[str, int | float],
    ) -> None:
        self.model, self.tokenizer, self.schedule, self.settings = model, tokenizer, schedule, settings
        self.step = 0
        self.seconds = 0.0
        self._loss = float("nan")
        embeddings = [model.shared.weight]
        matrices = [p for p in model.parameters() if p.ndim == 2 and p is not model.shared.weight]
        norms = [p for p in model.parameters() if p.ndim != 2]
        self._rates = [schedule.rate, schedule.rate, schedule.embedding_rate]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": 0.05},
                {"params": norms, "weight_decay": 0.0},
                {"params": embeddings, "weight_decay": 0.0},
            ],
            betas=(0.9, 0.98),
            fused=True,
        )

    @torch.enable_grad()
    def learn(self, batch: PaddedExamples) -> None:
        """Run one step: the gradients of one batch, clipped, and one update."""
        started = time.monotonic()
        fraction = self.schedule.rate_fraction(self.step)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * fraction
        self._optimizer.zero_grad()
        loss = loss_of(self.model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._loss = loss.item()
        self.step += 1
        self.seconds += time.monotonic() - started

    def report(self, held_out: Sequence[Example]) -> str:
        """Return a line with the loss of the last batch, and figures of a part of the held-out examples."""
        figures = figures_of(self.model, self.tokenizer, held_out[:: max(1, len(held_out) // 32)])
        return f"step {self.step}: {self.seconds:.0f} s, loss {self._loss:.3f}, held out {json.dumps(figures)}"

    def store(self, checkpoint: Path) -> None:
        """Replace the checkpoint, whole or not at all."""
        state = {
            "settings": self.settings,
            "step": self.step,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        unfinished = checkpoint.with_suffix(".unfinished")
        torch.save(state, unfinished)
        unfinished.replace(checkpoint)

    def resume(self, checkpoint: Path) -> None:
        """Take over the state that a checkpoint of the same training keeps.

        Raises: SystemExit if the checkpoint has other settings.
        """
        state = torch.load(checkpoint, weights_only=True)
        for name, value in self.settings.items():
            if state["settings"][name] != value:
                raise SystemExit(
                    f"--resume: {checkpoint} was made with --{name.replace('_', '-')} {state['settings'][name]}, not "
                    f"{value}. Give the same value, or start without --resume"
                )
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]


def loss_of(model: T5ForConditionalGeneration, batch: PaddedExamples) -> torch.Tensor:
    """Return the mean cross entropy of the targets' tokens."""
    outputs = model(input_ids=batch.sources, attention_mask=batch.sources != PAD_ID, labels=batch.labels)
    loss: torch.Tensor = outputs.loss
    return loss


@torch.no_grad()
def figures_of(
    model: T5ForConditionalGeneration, tokenizer: Tokenizer, examples: Sequence[Example]
) -> dict[str, float]:
    """Return the mean loss of a token, and the shares of words that greedy outputs copy, and restore exactly."""
    total, tokens = 0.0, 0
    restored = Restored(0, 0, 0)
    for pairs, group in zip(*in_groups(tokenizer, examples), strict=True):
        batch = padded(pairs)
        labels = int((batch.labels != IGNORED).sum())
        total += loss_of(model, batch).item() * labels
        tokens += labels
        outputs: Any = model.generate(  # type: ignore[misc]
            input_ids=batch.sources,
            attention_mask=batch.sources != PAD_ID,
            max_new_tokens=batch.labels.shape[1] + 8,
            do_sample=False,
        )
        for output, example in zip(outputs.tolist(), group, strict=True):
            restored += compare(tokenizer.decode(output), example.target)
    return {
        "loss": round(total / tokens, 3),
        "copied": round(restored.copied / restored.words, 3),
        "exact": round(restored.exact / restored.words, 3),
    }


def in_groups(
    tokenizer: Tokenizer, examples: Sequence[Example], size: int = 32
) -> tuple[list[list[tuple[list[int], list[int]]]], list[list[Example]]]:
    """Return the examples' token ids and the examples, both in groups of similar length."""
    ordered = sorted(examples, key=lambda example: len(example.source))
    groups = [ordered[first : first + size] for first in range(0, len(ordered), size)]
    return [encode(tokenizer, group) for group in groups], groups


def save(model: T5ForConditionalGeneration, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a folder in Hugging Face layout. Weights are stored as float16: half the bytes in the repository."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )
    folder.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(folder)
    copy.deepcopy(model).half().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    GenerationConfig(
        pad_token_id=PAD_ID, eos_token_id=END_ID, decoder_start_token_id=PAD_ID, do_sample=False
    ).save_pretrained(folder)


if __name__ == "__main__":
    main()
