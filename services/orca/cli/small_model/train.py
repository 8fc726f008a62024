"""Train the small model that ships with Orca: a Llama of 3 million parameters that writes like Jane Austen.

The text is the six novels in Debian's package r-cran-janeaustenr (novels: public domain; package: MIT). Neither the
package nor R needs to be installed:

    apt-get download r-cran-janeaustenr && dpkg -x r-cran-janeaustenr_*.deb austen
    python -m orca.cli.small_model.train --package austen --out services/orca/cli/small_model/orca-austen

The model learns two kinds of document: chapters, so that it continues a text, and the novels' dialogues as chats, so
that it answers a line and ends. With one thread and a fixed seed, the same machine writes the same weights again.
"""

import argparse
import json
import math
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from orca.cli.small_model.novels import is_heading, read_novels

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 2048
CONTEXT = 512  # positions in training; the model's max_position_embeddings
TURNS_MAX = 6  # turns of one chat
HELD_OUT = 40  # one document in 40 is held out for the loss that the model card quotes


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSchedule:
    """The length and learning rates of the training. A step uses `tokens` tokens, cut into windows."""

    steps: int
    tokens: int
    matrix_rate: float  # learning rate of Muon, for the matrices inside the layers
    other_rate: float  # learning rate of AdamW, for embeddings and norms
    warmup: int = 40  # steps
    floor: float = 0.02  # fraction of the rate that is left at the last step

    def window(self, step: int) -> int:
        """Return the tokens of a window: half the context for three quarters of the steps, then all of it.

        Attention costs half as much with the shorter window.
        """
        return CONTEXT // 2 if step < self.steps * 3 // 4 else CONTEXT

    def rate_fraction(self, step: int) -> float:
        """Return the fraction of the full rate at `step`: linear warm-up, then a cosine down to `floor`."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--package", type=Path, required=True, help="folder with the unpacked r-cran-janeaustenr")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--steps", type=int, default=1900)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per step")
    parser.add_argument("--matrix-rate", type=float, default=0.02)
    parser.add_argument("--other-rate", type=float, default=0.004)
    parser.add_argument("--seed", type=int, default=1775)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    documents = list(documents_of(read_novels(options.package)))
    random.Random(options.seed).shuffle(documents)
    tokenizer = learn_tokenizer(documents)
    held_out = encode(tokenizer, documents[::HELD_OUT])
    learned = encode(tokenizer, [text for place, text in enumerate(documents) if place % HELD_OUT])
    print(f"{len(documents)} documents, {len(learned)} tokens to learn, {len(held_out)} held out", flush=True)

    model = LlamaForCausalLM(configuration(tokenizer))
    started = time.monotonic()
    schedule = TrainingSchedule(
        steps=options.steps,
        tokens=options.tokens,
        matrix_rate=options.matrix_rate,
        other_rate=options.other_rate,
    )
    train(model, learned, held_out, schedule)
    seconds = time.monotonic() - started
    figures = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens_seen": options.steps * options.tokens,
        "held_out_loss": round(mean_loss(model, held_out), 3),
        "seconds": round(seconds),
    }
    save(model, tokenizer, options.out)
    print(json.dumps(figures))


def documents_of(novels: list[list[str]]) -> Iterator[str]:
    """Yield every chapter as it is, and every run of spoken paragraphs as a chat of user and assistant."""
    for novel in novels:
        chapter: list[str] = []
        spoken: list[str] = []
        for paragraph in [*novel, "CHAPTER"]:
            if is_heading(paragraph):
                if chapter:
                    yield "\n".join(chapter) + END_OF_TEXT
                chapter = []
                continue
            chapter.append(paragraph)
            if paragraph.startswith('"'):
                spoken.append(paragraph)
                continue
            yield from chats_of(spoken)
            spoken = []


def chats_of(spoken: list[str]) -> Iterator[str]:
    """Cut a dialogue into chats with an even number of turns, so that each ends with the assistant."""
    for first in range(0, len(spoken) - 1, TURNS_MAX):
        turns = spoken[first : first + TURNS_MAX]
        turns = turns[: len(turns) // 2 * 2]
        yield "".join(
            f"{TURN_START}{'assistant' if place % 2 else 'user'}\n{unquoted(turn)}{TURN_END}\n"
            for place, turn in enumerate(turns)
        )


def unquoted(turn: str) -> str:
    """Remove the quotes of a line that is one quotation. Lines that are interrupted by "said she" stay as they are."""
    return turn[1:-1] if turn.count('"') == 2 and turn.endswith('"') else turn


def learn_tokenizer(documents: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer: any text has tokens, and any tokens have a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    specials = re.compile("|".join(map(re.escape, (END_OF_TEXT, TURN_START, TURN_END))))
    tokenizer.train_from_iterator((specials.sub("", document) for document in documents), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str]) -> torch.Tensor:
    """Encode all documents, one after the other. Returns: token ids [tokens]."""
    return torch.tensor([token for document in documents for token in tokenizer.encode(document).ids])


def configuration(tokenizer: Tokenizer) -> LlamaConfig:
    """Return six layers, with six heads over two KV heads: 1, 2, 3 or 6 stages and 1 or 2 ranks can divide them."""
    end_of_text, turn_end = tokenizer.encode(END_OF_TEXT + TURN_END).ids
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=end_of_text,
        eos_token_id=[end_of_text, turn_end],
    )


def train(model: LlamaForCausalLM, learned: torch.Tensor, held_out: torch.Tensor, schedule: TrainingSchedule) -> None:
    """Train the model in place, and print the loss every 200 steps."""
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers." in name]
    outer = [p for name, p in model.named_parameters() if p.ndim != 2 or "layers." not in name]
    optimizers = [
        (
            torch.optim.Muon(inner, lr=schedule.matrix_rate, weight_decay=0.1, adjust_lr_fn="original"),
            schedule.matrix_rate,
        ),
        (torch.optim.AdamW(outer, lr=schedule.other_rate, betas=(0.9, 0.95), weight_decay=0.01), schedule.other_rate),
    ]
    for step in range(schedule.steps):
        if step == 0 or schedule.window(step) != schedule.window(step - 1):
            windows = windows_of(learned, schedule.window(step), schedule.tokens)
        for optimizer, rate in optimizers:
            optimizer.param_groups[0]["lr"] = rate * schedule.rate_fraction(step)
            optimizer.zero_grad()
        loss = loss_of(model, next(windows))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, _ in optimizers:
            optimizer.step()
        if step % 200 == 0 or step == schedule.steps - 1:
            print(f"step {step}: loss {loss.item():.3f}, held out {mean_loss(model, held_out):.3f}", flush=True)


def windows_of(tokens: torch.Tensor, length: int, step_tokens: int) -> Iterator[torch.Tensor]:
    """Yield batches [step_tokens / length, length + 1]: the text once per epoch, cut at another offset each time."""
    while True:
        offset = int(torch.randint(length, ()))
        starts = offset + torch.randperm((len(tokens) - offset - 1) // length) * length
        for chosen in starts.split(step_tokens // length):
            yield torch.stack([tokens[start : start + length + 1] for start in chosen.tolist()])


def loss_of(model: LlamaForCausalLM, windows: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the next token over windows [batch, length + 1].

    It computes in bfloat16 with float32 weights.
    """
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def mean_loss(model: LlamaForCausalLM, tokens: torch.Tensor) -> float:
    """Return the mean loss over all windows of the tokens."""
    windows = tokens[: (len(tokens) - 1) // CONTEXT * CONTEXT + 1].unfold(0, CONTEXT + 1, CONTEXT)
    return sum(loss_of(model, window[None]).item() for window in windows) / len(windows)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a folder in Hugging Face layout. Weights are stored as float16: half the bytes in the repository."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START, TURN_END],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    folder.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(folder, save_jinja_files=False)
    model.half().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
    ).save_pretrained(folder)


if __name__ == "__main__":
    main()
