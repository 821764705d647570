"""Rules of the source tree: which package may import which, no cycles, what lies where.

Each check takes a repository and yields one line per violation; every check is seen failing below.
"""

import ast
import fnmatch
import graphlib
import pathlib
import re
from collections.abc import Iterator

import pytest

REPO = pathlib.Path(__file__).parent.parent

README = pathlib.Path("jaxsp/README.md")


def read_packages(repo: pathlib.Path) -> tuple[list[list[str]], set[str]]:
    """Packages of README's first block of code by layer, from the bottom up; and all folders.
    Packages on one layer do not know each other. `commands` are the modules directly in jaxsp/."""
    layers: list[list[str]] = []
    folders: set[str] = set()
    block = (repo / README).read_text(encoding="utf-8").partition("```\n")[2].partition("```")[0]
    for line in block.splitlines():
        if package := re.match(r"([ \d]{2}) (\w+) ", line):
            layers += [[]] if package[1].strip() else []
            layers[-1].append(package[2])
            folders.add(package[2])
        elif inner := re.match(r" {5}(\w[\w/]+/( |$))+", line):
            folders |= {f"{layers[-1][-1]}/{name.strip('/')}" for name in inner[0].split()}
    return layers[::-1], folders - {"commands"}


LAYERS, _ = read_packages(REPO)

PRIVATE_JAX = ("jaxsp.attention.kernels.cudnn_calls", "jaxsp.system.distributed")
"""The only modules that may use `jax._src`: cuDNN's calls, and the key-value store of processes."""

NON_EMPTY_INIT = ("jaxsp/__init__.py",)
"""The only `__init__.py` files with code."""

TOP_LEVEL = "pyproject.toml README.md LICENSE configs scripts tests jaxsp .ci .git*".split()

CATCH_ALL_NAMES = ("util", "utils", "helper", "helpers", "common", "misc")


def python_files(repo: pathlib.Path, *folders: str) -> Iterator[pathlib.Path]:
    for folder in folders:
        yield from sorted((repo / folder).rglob("*.py"))


def imports(repo: pathlib.Path, file: pathlib.Path) -> set[str]:
    """Full names of a file's imports: modules of jaxsp, and names of other packages."""
    package = file.relative_to(repo).parent.parts
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and node.attr == "_src":
            names.add(f"{ast.unparse(node.value)}._src")
    return {module_of(repo, name) if name.startswith("jaxsp.") else name for name in names}


def module_of(repo: pathlib.Path, name: str) -> str:
    """The module of an imported name: `jaxsp.core.batch` for `jaxsp.core.batch.Batch`."""
    while name and not repo.joinpath(*name.split(".")).with_suffix(".py").exists():
        if repo.joinpath(*name.split("."), "__init__.py").exists():
            return f"{name}.__init__"
        name = name.rpartition(".")[0]
    return name


def module_graph(repo: pathlib.Path) -> dict[str, set[str]]:
    """Imported modules of jaxsp, by module. Empty `__init__.py` files are left out."""
    return {
        ".".join(file.relative_to(repo).with_suffix("").parts): imports(repo, file)
        for file in python_files(repo, "jaxsp")
        if file.stat().st_size
    }


def layer_and_package(module: str) -> tuple[int | None, str]:
    """Index into LAYERS and top-level package of a module; None for an unknown package."""
    package, _, rest = module.removeprefix("jaxsp.").partition(".")
    if not rest:
        package = "commands"
    indices = (index for index, packages in enumerate(LAYERS) if package in packages)
    return next(indices, None), package


def wrong_imports(repo: pathlib.Path) -> Iterator[str]:
    for module, names in module_graph(repo).items():
        layer, package = layer_and_package(module)
        if layer is None:
            yield f"{module}: add its package to README"
            continue
        forbidden = r"torch\b" if module in PRIVATE_JAX else r"torch\b|jax\._src\b"
        for name in sorted(names):
            if re.match(forbidden, name):
                yield f"{module} imports {name}"
            if not name.startswith("jaxsp."):
                continue
            other_layer, other_package = layer_and_package(name)
            is_lower = other_layer is not None and other_layer < layer
            if other_package != package and not is_lower:
                yield f"{module} imports {name}, which is not in a lower layer"


def cycles(repo: pathlib.Path) -> Iterator[str]:
    """Cycles between modules, and cycles between folders."""
    modules = {
        module: {name for name in names if name.startswith("jaxsp.")}
        for module, names in module_graph(repo).items()
    }
    folders: dict[str, set[str]] = {}
    for module, names in modules.items():
        folder = module.rpartition(".")[0]
        others = {name.rpartition(".")[0] for name in names} - {folder}
        folders.setdefault(folder, set()).update(others)
    for graph in (modules, folders):
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            yield f"cycle: {' imports '.join(reversed(error.args[1]))}"


def wrong_files(repo: pathlib.Path) -> Iterator[str]:
    ignore = repo / ".gitignore"
    lines = ignore.read_text().splitlines() if ignore.exists() else []
    allowed = [*TOP_LEVEL, *(line.rstrip("/") for line in lines)]
    for path in sorted(repo.iterdir()):
        if not any(fnmatch.fnmatch(path.name, pattern) for pattern in allowed):
            yield f"{path.name}: is not one of {', '.join(TOP_LEVEL)}"
    for file in python_files(repo, "jaxsp", "tests", "scripts"):
        name = file.relative_to(repo)
        if set(name.with_suffix("").parts) & set(CATCH_ALL_NAMES):
            yield f"{name}: a catch-all name; name what is in it"
        if name.parts[0] == "jaxsp" and file.name == "__init__.py":
            if str(name) not in NON_EMPTY_INIT and file.stat().st_size:
                yield f"{name}: is not empty"


def wrong_package_list(repo: pathlib.Path) -> Iterator[str]:
    """Packages that README does not list, and lines for packages that do not exist."""
    _, listed = read_packages(repo)
    packages = {
        str(file.parent.relative_to(repo / "jaxsp"))
        for file in python_files(repo, "jaxsp")
        if file.stat().st_size and file.parent != repo / "jaxsp"
    }
    for name in sorted(packages - listed):
        yield f"{README}: has no line for {name}/"
    for name in sorted(listed - packages):
        yield f"{README}: there is no package {name}/"


@pytest.mark.parametrize("check", [wrong_imports, cycles, wrong_files, wrong_package_list])
def test_this_repository(check):
    assert list(check(REPO)) == []


VIOLATIONS = [
    (
        wrong_imports,
        "core/errors",
        "import jaxsp.training.loss",
        "imports jaxsp.training.loss, which",
    ),
    (wrong_imports, "model/layers", "def f():\n from ..hf import names", "imports jaxsp.hf.names"),
    (wrong_imports, "training/loss", "from jaxsp import train", "imports jaxsp.train, which"),
    (wrong_imports, "hf/names", "def f():\n  import torch.nn", "jaxsp.hf.names imports torch.nn"),
    (wrong_imports, "core/errors", "import jax\njax._src.mesh.x", "imports jax._src"),
    (wrong_imports, "core/errors", "from jax._src import mesh", "imports jax._src.mesh"),
    (wrong_imports, "core/errors", "from jax import _src", "imports jax._src"),
    (wrong_imports, "attic/errors", "x = 1", "jaxsp.attic.errors: add its package to README"),
    (cycles, "core/axes", "from . import errors", "jaxsp.core.errors imports jaxsp.core.axes"),
    (cycles, "core/inner/a", "from jaxsp.core import axes, b", "cycle: jaxsp.core"),
    (wrong_files, "../setup", "x = 1", "setup.py: is not one of"),
    (wrong_files, "../tests/utils", "x = 1", "tests/utils.py: a catch-all name"),
    (wrong_files, "common/x", "x = 1", "jaxsp/common/x.py: a catch-all name"),
    (wrong_files, "data/__init__", "x = 1", "jaxsp/data/__init__.py: is not empty"),
    (wrong_package_list, "core/new/axes", "x = 1", "has no line for core/new/"),
    (wrong_package_list, "hf/names", "", "there is no package hf/"),
]


@pytest.mark.parametrize(("check", "name", "text", "violation"), VIOLATIONS)
def test_each_check_finds_a_violation(tmp_path, check, name, text, violation):
    modules = ("train", "core/axes", "core/b", "training/loss", "hf/names")
    valid = {f"jaxsp/{module}.py": "x = 1" for module in modules}
    valid["jaxsp/core/errors.py"] = "from jaxsp.core import axes"
    valid["jaxsp/core/inner/c.py"] = "x = 1"
    valid["jaxsp/core/b.py"] = "from jaxsp.core.inner import c"
    valid[str(README)] = "```\n 3 training a\n   hf a\n 1 core a\n     inner/\n```\n"
    for file, content in valid.items():
        write(tmp_path / file, content)
    assert list(check(tmp_path)) == []
    write(tmp_path / f"jaxsp/{name}.py", text)
    assert violation in "\n".join(check(tmp_path))


def write(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
