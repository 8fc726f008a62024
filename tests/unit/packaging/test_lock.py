"""The lock files: what `make run` and `make test` install."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
ROLES = ["gateway", "scheduler", "worker", "operator", "fetch"]
"""Each is an extra and an image (services/Containerfile)."""
LOCKS = ["dev", "local", "smollm2", "build", "quick", *ROLES]
PYTHONS = ["3.11", "3.12"]


def wanted(extras: list[str], groups: list[str]) -> list[Requirement]:
    """Return the dependencies in pyproject.toml, with the extras of the project resolved."""
    texts = list(PROJECT["dependencies"]) if extras else []
    queue = list(extras)
    while queue:
        for text in PROJECT["optional-dependencies"][queue.pop()]:
            requirement = Requirement(text)
            if requirement.name == PROJECT["name"]:
                queue += requirement.extras
            else:
                texts.append(text)
    for group in groups:
        texts += [entry for entry in GROUPS[group] if isinstance(entry, str)]
    return [Requirement(text) for text in texts]


def pins(lock: str, python: str) -> dict[str, str]:
    """Package -> version that a lock gives a Linux machine with this Python."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.9",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
    }
    lines = re.findall(r"^([a-z].*?) \\$", (ROOT / ".lock" / f"{lock}.txt").read_text(), re.MULTILINE)
    found = {}
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            [pin] = requirement.specifier
            assert pin.operator == "=="
            assert requirement.name not in found
            found[canonicalize_name(requirement.name)] = pin.version
    return found


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(
    ("lock", "extras", "groups"),
    [
        ("dev", ["local", "smollm2", "operator", "fetch", "bench"], ["dev", "build", "docs", "quick"]),
        ("local", ["local"], []),
        ("smollm2", ["smollm2"], []),
        ("build", [], ["build"]),
        ("quick", ["gateway", "scheduler", "operator", "fetch", "bench"], ["build", "quick"]),
        *((role, [role], []) for role in ROLES),
    ],
    ids=LOCKS,
)
def test_a_lock_has_a_fitting_version_of_every_dependency_in_pyproject(
    lock: str, extras: list[str], groups: list[str], python: str
) -> None:
    locked = pins(lock, python)
    for requirement in wanted(extras, groups):
        version = locked.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is not locked: make lock"
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement} is locked at {version}"


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("lock", LOCKS[1:])
def test_the_smaller_locks_are_subsets_of_the_development_lock(lock: str, python: str) -> None:
    assert pins(lock, python).items() <= pins("dev", python).items()


@pytest.mark.parametrize("lock", LOCKS)
def test_every_locked_package_has_hashes(lock: str) -> None:
    packages = re.split(r"^(?=[a-z])", (ROOT / ".lock" / f"{lock}.txt").read_text(), flags=re.MULTILINE)[1:]
    assert [package.split()[0] for package in packages if "--hash=sha256:" not in package] == []


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_names_no_index_and_no_path_of_the_machine_that_made_it(lock: str) -> None:
    text = (ROOT / ".lock" / f"{lock}.txt").read_text()
    assert (
        re.findall(r"--(?:index-url|extra-index-url|find-links|trusted-host)|file:|https?:|@ |/home|/root", text) == []
    )


@pytest.mark.parametrize("role", ["gateway", "scheduler", "operator", "fetch"])
def test_only_the_workers_lock_has_torch(role: str) -> None:
    heavy = {"torch", "triton", "numpy", "transformers"}
    assert heavy & pins(role, "3.11").keys() == set()
    assert "torch" in pins("worker", "3.11")


def test_only_the_conversion_of_a_model_needs_transformers() -> None:
    libraries = {"accelerate", "gguf", "transformers"}
    assert libraries & pins("local", "3.11").keys() == set()
    assert libraries <= pins("smollm2", "3.11").keys()


def test_quick_tests_need_no_library_that_computes_models() -> None:
    assert {"torch", "triton", "transformers", "numba"} & pins("quick", "3.11").keys() == set()


def imported(path: Path) -> set[str]:
    """Return the modules that a file imports, by their full names."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def test_quick_tests_import_only_libraries_that_are_locked_for_them() -> None:
    tests = ROOT / "tests"
    queue = list((tests / "unit").rglob("*.py"))
    seen: set[Path] = set()
    libraries = set()
    while queue:
        path = queue.pop()
        seen.add(path)
        for name in imported(path):
            if name.startswith("support."):
                module = (tests / name.replace(".", "/")).with_suffix(".py")
                queue += {module} - seen if module.exists() else []
            else:
                libraries.add(name.split(".")[0])
    locked = pins("quick", f"{sys.version_info.major}.{sys.version_info.minor}")
    found = packages_distributions()
    packages = {library: set(map(canonicalize_name, found.get(library, ()))) for library in libraries - {"orca"}}
    assert {library for library, names in packages.items() if names and not names & locked.keys()} == set()
