"""`orca bench exegpt 10`: catalogues of messages, their lengths, and plans that run on held-out lengths."""

import struct
from pathlib import Path

import pytest

from orca.bench.exegpt.catalogues.figure10 import held_out_run, length_rows, trace_of, workload_of_lengths
from orca.bench.exegpt.catalogues.messages import message_pairs, split, token_lengths
from orca.bench.exegpt.catalogues.mo_file import read_messages
from orca.bench.exegpt.setups import Setup
from orca.bench.main import main as bench
from orca.core.domain.errors import SettingError

HEADER = (b"", b"Project-Id-Version: x\nContent-Type: text/plain; charset=UTF-8\n")


def catalogue(*pairs: tuple[bytes, bytes], order: str = "<") -> bytes:
    """Return the bytes of a catalogue, as msgfmt writes them."""
    begin = 28
    table = begin + 16 * len(pairs)
    heads: tuple[list[bytes], list[bytes]] = ([], [])
    texts = b""
    for column in (0, 1):
        for pair in pairs:
            heads[column].append(struct.pack(f"{order}II", len(pair[column]), table + len(texts)))
            texts += pair[column] + b"\0"
    places = (begin, begin + 8 * len(pairs), 0, 0)
    first = struct.pack(f"{order}7I", 0x950412DE, 0, len(pairs), *places)
    return first + b"".join(heads[0] + heads[1]) + texts


def write(folder: Path, language: str, name: str, content: bytes) -> Path:
    file = folder / language / "LC_MESSAGES" / f"{name}.mo"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("order", "<>")
def test_messages_are_read_with_their_forms(tmp_path: Path, order: str) -> None:
    content = catalogue(
        HEADER,
        (b"open", "\u00f6ffnen".encode()),
        (b"menu\x04save", b"sichern"),
        (b"one file\0many files", b"eine Datei\0viele Dateien"),
        (b"nothing yet", b""),
        order=order,
    )
    assert read_messages(write(tmp_path, "de", "a", content)) == [
        ("open", "\u00f6ffnen"),
        ("save", "sichern"),
        ("one file", "eine Datei"),
        ("many files", "viele Dateien"),
    ]


def test_a_catalogue_states_how_it_is_encoded(tmp_path: Path) -> None:
    header = (b"", b"Content-Type: text/plain; charset=ISO-8859-1\n")
    file = write(tmp_path, "de", "a", catalogue(header, (b"open", b"\xf6ffnen")))
    assert read_messages(file) == [("open", "\u00f6ffnen")]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "buffer"),
        (b"not a catalogue at all", "its first number is another one"),
        (catalogue(HEADER)[:40], "beyond its end"),
        (struct.pack("<7I", 0x950412DE, 0, 10**6, 28, 36, 0, 0), "1000000 messages do not fit into 28 bytes"),
        (catalogue(HEADER, (b"open", b"\xff\xfe")), "invalid start byte"),
    ],
)
def test_what_is_no_catalogue_is_refused_by_its_name(tmp_path: Path, content: bytes, reason: str) -> None:
    file = write(tmp_path, "de", "broken", content)
    with pytest.raises(SettingError, match=f"broken.mo is no message catalogue: .*{reason}"):
        read_messages(file)


def many(count: int, *, begin: int = 0) -> bytes:
    pairs = [(f"word {number}".encode(), f"wort {number}".encode()) for number in range(begin, begin + count)]
    return catalogue(HEADER, *pairs)


def test_a_message_counts_once_for_a_language(tmp_path: Path) -> None:
    file = write(tmp_path, "de", "a", many(700))
    write(tmp_path, "de", "b", many(200, begin=600))
    write(tmp_path, "fr", "a", many(300))
    file.with_name("link.mo").symlink_to(file)
    assert len(message_pairs(tmp_path, ["de", "fr"])) == 800 + 300


def test_a_machine_without_catalogues_is_told_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"have 0 messages.*apt-get install iso-codes.*path-exclude"):
        bench(["exegpt", "10", "--catalogues", str(tmp_path)])
    with pytest.raises(SettingError, match="--real is for table7, not for 10"):
        bench(["exegpt", "10", "--real"])


def test_tokens_are_those_of_a_learned_tokenizer_or_of_a_model(tmp_path: Path) -> None:
    pairs = [(f"open the file {number}", f"die Datei {number} \u00f6ffnen") for number in range(100)]
    lengths = token_lengths(pairs, None)
    assert len(lengths) == 100
    # Words that all messages have are one token each, and a number has as many as digits at most.
    assert all(4 <= source <= 6 and 4 <= translation <= 6 for source, translation in lengths)
    assert token_lengths(pairs, None) == lengths
    with pytest.raises(SettingError, match=r"has no tokenizer\.json"):
        token_lengths(pairs, tmp_path)


def test_a_tenth_is_for_the_plan_and_long_messages_are_left_out() -> None:
    lengths = [(number % 7 + 1, number % 9 + 1) for number in range(1_000)] + [(400, 400)] * 50
    found = split(lengths, longest=512)
    assert (len(found.sample), len(found.rest), found.left_out) == (100, 900, 50)
    assert sorted([*found.sample, *found.rest]) == sorted(lengths[:1_000])
    assert split(lengths, longest=512) == found
    assert split(lengths, longest=512, seed=1) != found
    rows = {(row.what, row.settings.get("share"), row.settings.get("text")): row.ours for row in length_rows(found)}
    assert rows["Messages", "90 %", None] == 900
    assert rows["Tokens of a message, p99", "90 %", "source"] == 7
    assert rows["Tokens of a message, p99.5", "90 %", "source"] == 7
    assert rows["Messages left out", None, None] == pytest.approx(100 * 50 / 1_050)


def test_a_run_has_long_messages_as_often_as_all_others_and_in_random_order() -> None:
    others = workload_of_lengths([(3, 4)] * 9_900 + [(50, 60)] * 100)
    requests = trace_of(others, 1_000).requests
    long = [each.index for each in requests if (each.prompt_tokens, each.new_tokens) == (50, 60)]
    assert len(long) == 10
    assert {each.arrival_s for each in requests} == {0.0}
    assert len({index // 100 for index in long}) < 10, "each hundred has one: batches differ less than by chance"


def test_a_plan_from_the_sample_runs_on_other_messages() -> None:
    lengths = split([(450 + number % 20, number % 4 + 2) for number in range(4_000)], longest=512)
    setup = Setup("OPT 13B", "A40", 1)
    run = held_out_run(setup, workload_of_lengths(lengths.sample), lengths.rest, 0, 100, margin=10)
    assert run.is_promised
    assert run.bound == "10 %"
    rows = {row.what: row for row in run.rows()}
    assert rows["p99 latency of other messages"].goal == (0.0, run.bound_s)
    # These lengths are all alike, so the margin is enough.
    assert run.is_met
    assert run.gain == run.figures.throughput / run.baseline
    assert rows["p99 latency of other messages"].settings["margin"] == "10 %"
    assert run.figures.requests >= 75
