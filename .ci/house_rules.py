"""Check the rules of style that ruff, mypy and import-linter do not know; `make static` runs this file.

    python .ci/house_rules.py            check, print each violation, exit with 1 if there is one
    python .ci/house_rules.py --report   print the counts only (also of another checkout: --root DIR)
    python .ci/house_rules.py --allow sentence=10    accept as many as there still are; the number only goes down

docstring   A docstring begins with a verb or with a noun as its subject, not with a preposition or a relative word.
class       The name of a public class exists once in the product, but for Settings and Metrics of each service.
size        A class has at most 200 lines and 15 methods. LARGE_CLASSES may be larger; the docstring of each says
            why it is "one idea".
folder      A folder of product code holds at most 15 modules.
document    A comment or docstring cites only documents that are in the repository.
sentence    A sentence of a comment or docstring has at most 30 words.

The product is services/, operator/ and kernels/. The rules docstring, document and sentence also hold for e2e/ and
tests/.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PRODUCT = ("services", "operator", "kernels")
TESTS = ("e2e", "tests")
MODULES_MAX = 15
WORDS_MAX = 30
CLASS_LINES = 200
CLASS_METHODS = 15

PREPOSITIONS = (
    "of by in on at from to for with without within between beside besides behind before after until since while under "
    "over above below into out as about against among through during per than like"
)
RELATIVES = "that what whatever which who whom whose whoever whether where wherever when whenever how why if because so"
NO_SUBJECT = frozenset(f"{PREPOSITIONS} {RELATIVES}".split())
SHARED_NAMES = frozenset({"Settings", "Metrics"})
LARGE_CLASSES = frozenset(
    {"Connection", "Controller", "MemoryPool", "Rank", "RedisPool", "RendezvousStore", "RequestPool"}
)

_DOCUMENT = re.compile(r"(?<![\w/*])([\w./-]+\.md)\b")
_SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z`(\"'\d])|\n\s*\n")
_COLUMNS = re.compile(r"\S {3,}\S|[│├└]")  # of a table or a tree
_WORD = re.compile(r"[A-Za-z][\w'.-]*")


@dataclass(frozen=True, slots=True)
class Violation:
    """A place that breaks a rule, and what is wrong with it."""

    rule: str
    place: str
    text: str


@dataclass(frozen=True, slots=True)
class Prose:
    """A docstring, or a block of comment lines that follow each other."""

    line: int
    text: str
    is_docstring: bool


@dataclass(frozen=True, slots=True)
class ClassSize:
    name: str
    place: str
    lines: int
    methods: int
    is_public: bool
    docstring: str

    @property
    def is_large(self) -> bool:
        return self.lines > CLASS_LINES or self.methods > CLASS_METHODS


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the checkout (this one)")
    parser.add_argument("--report", action="store_true", help="print counts, check nothing")
    parser.add_argument(
        "--allow", type=_allowance, action="append", default=[], metavar="RULE=N", help="violations of a rule to accept"
    )
    options = parser.parse_args()
    files = tracked_files(options.root)
    sources = {path: (options.root / path).read_text(encoding="utf-8") for path in files if is_checked(path)}
    violations = list(check(sources, {path.name for path in files if path.suffix == ".md"}))
    if options.report:
        report(sources, violations)
        return 0
    allowed = dict(options.allow)
    counts = Counter(violation.rule for violation in violations)
    broken = {rule for rule, count in counts.items() if count > allowed.get(rule, 0)}
    for violation in violations:
        if violation.rule in broken:
            print(f"{violation.place}: {violation.rule}: {violation.text}")
    print(f"house rules: {dict(counts)} in {len(sources)} files; allowed: {allowed}")
    return 1 if broken else 0


def _allowance(text: str) -> tuple[str, int]:
    rule, _, count = text.partition("=")
    return rule, int(count)


def tracked_files(root: Path) -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=root, check=True, capture_output=True, text=True).stdout
    return [path for path in map(Path, listed.splitlines()) if (root / path).is_file()]


def is_checked(path: Path) -> bool:
    return path.suffix == ".py" and "_pb2" not in path.name and path.parts[0] in (*PRODUCT, *TESTS)


def check(sources: dict[Path, str], documents: set[str]) -> Iterator[Violation]:
    """Yield the violations of all rules.

    Args:
        sources: text of each Python file, by its path in the repository.
        documents: names of the Markdown files in the repository.
    """
    for path, source in sources.items():
        for prose in prose_of(source):
            place = f"{path}:{prose.line}"
            if prose.is_docstring:
                yield from check_start(prose.text, place)
            yield from check_documents(prose.text, place, documents)
            yield from check_sentences(prose.text, place)
    yield from check_classes(sources)
    yield from check_sizes(sources)
    yield from check_folders(sources)


def check_start(text: str, place: str) -> Iterator[Violation]:
    word = first_word(text)
    if word.lower() in NO_SUBJECT:
        yield Violation("docstring", place, f"begins with {word!r}, which is neither a verb nor a subject")


def check_documents(text: str, place: str, documents: set[str]) -> Iterator[Violation]:
    for name in _DOCUMENT.findall(text):
        if Path(name).name not in documents:
            yield Violation("document", place, f"{name} is not in the repository")


def check_sentences(text: str, place: str) -> Iterator[Violation]:
    for sentence in sentences_of(text):
        words = len(_WORD.findall(sentence))
        if words > WORDS_MAX:
            yield Violation("sentence", place, f"{words} words: {' '.join(sentence.split())[:80]}...")


def check_classes(sources: dict[Path, str]) -> Iterator[Violation]:
    places = defaultdict(list)
    for found in classes_of(sources):
        if found.is_public and found.name not in SHARED_NAMES:
            places[found.name].append(found.place)
    for name, where in places.items():
        if len(where) > 1:
            yield Violation("class", where[0], f"{name} is the name of {len(where)} classes: {', '.join(where)}")


def check_sizes(sources: dict[Path, str]) -> Iterator[Violation]:
    for found in classes_of(sources):
        size = f"{found.name} has {found.lines} lines and {found.methods} methods"
        if found.name not in LARGE_CLASSES:
            if found.is_large:
                yield Violation("size", found.place, f"{size}: split it, or see LARGE_CLASSES")
        elif not found.is_large:
            yield Violation("size", found.place, f"{size}: take it out of LARGE_CLASSES")
        elif "one idea" not in found.docstring:
            yield Violation("size", found.place, f"{size}: its docstring does not say why it is one idea")


def check_folders(sources: dict[Path, str]) -> Iterator[Violation]:
    for folder, modules in modules_by_folder(sources).items():
        if modules > MODULES_MAX:
            yield Violation("folder", str(folder), f"{modules} modules")


def prose_of(source: str) -> Iterator[Prose]:
    """Yield docstrings, also those below a field or a constant, and comments."""
    for node in ast.walk(ast.parse(source)):
        for statement in getattr(node, "body", ()) if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield Prose(statement.lineno, text, is_docstring=True)
    block: list[str] = []
    block_line = last_line = column = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith(("#!", "# noqa", "# type:")):
            continue
        # A comment after code on its line stands alone: the next field's comment is another sentence.
        is_after_code = bool(token.line[: token.start[1]].strip())
        if token.start[0] != last_line + 1 or is_after_code or token.start[1] != column:
            if block:
                yield Prose(block_line, "\n".join(block), is_docstring=False)
            block, (block_line, column) = [], token.start
        block.append(token.string.lstrip("# "))
        last_line = token.start[0]
    if block:
        yield Prose(block_line, "\n".join(block), is_docstring=False)


def first_word(text: str) -> str:
    found = re.match(r"[\s`\"'(*]*([\w'-]+)", text)
    return found.group(1) if found else ""


def sentences_of(text: str) -> Iterator[str]:
    """Yield the sentences of the paragraphs; lists, tables and code, which are indented, are left out."""
    lines = text.splitlines()
    margin = min((len(line) - len(line.lstrip()) for line in lines[1:] if line.strip()), default=0)
    kept = []
    for number, line in enumerate(lines):
        is_indented = number > 0 and len(line) - len(line.lstrip()) > margin
        is_row = re.match(r"\s*([-*|]|\d\.) ?", line) or _COLUMNS.search(line)
        kept.append("" if is_indented or is_row else line)
    yield from (sentence for sentence in _SENTENCE_END.split("\n".join(kept)) if sentence and sentence.strip())


def classes_of(sources: dict[Path, str]) -> Iterator[ClassSize]:
    for path, source in sources.items():
        if path.parts[0] not in PRODUCT:
            continue
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) for item in node.body)
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                place = f"{path}:{node.lineno}"
                docstring = ast.get_docstring(node) or ""
                is_public = not node.name.startswith("_")
                yield ClassSize(node.name, place, lines, methods, is_public=is_public, docstring=docstring)


def modules_by_folder(sources: dict[Path, str]) -> Counter[Path]:
    return Counter(path.parent for path in sources if path.parts[0] in PRODUCT and path.name != "__init__.py")


def report(sources: dict[Path, str], violations: list[Violation]) -> None:
    """Print how often each rule is broken, the first words of docstrings, and the longest classes."""
    print("violations:", dict(Counter(violation.rule for violation in violations)))
    docstrings = [
        prose
        for path, source in sources.items()
        if path.parts[0] in PRODUCT
        for prose in prose_of(source)
        if prose.is_docstring
    ]
    print(f"docstrings of the product: {len(docstrings)}")
    counted = Counter(first_word(prose.text).capitalize() for prose in docstrings)
    print("first words:", ", ".join(f"{word} {count}" for word, count in counted.most_common(30)))
    folders = modules_by_folder(sources)
    print("modules in the largest folders:", ", ".join(f"{folder} {count}" for folder, count in folders.most_common(8)))
    sizes = sorted(classes_of(sources), key=lambda size: -size.lines)
    large = [size for size in sizes if size.is_large]
    print(f"classes over {CLASS_LINES} lines or {CLASS_METHODS} methods: {len(large)}")
    for size in large[:20]:
        print(f"  {size.name} {size.lines} lines, {size.methods} methods ({size.place})")


if __name__ == "__main__":
    sys.exit(main())
