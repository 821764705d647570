"""Who may import whom, what lies where, and that README's tree tells the truth.

Each checker takes a folder and returns what is wrong in it, one line each; every one of them is seen failing below.
"""

import ast
import fnmatch
import pathlib
import re
from collections.abc import Iterator

import pytest

REPO = pathlib.Path(__file__).parent.parent

FLOORS = ("core", "attention data", "model", "training hf", "planner", "commands")
"""From the ground up. A module imports from lower floors; rooms on one floor do not know each other."""

PLACES = {
    "core": "axes errors durations paths jobs processes notation foreign_names advice foreign_config given config mesh "
    "layout batch",
    "attention": "kernels.pieces kernels.residuals kernels.reference kernels.blockwise "
    "kernels.packed kernels.cudnn_calls kernels.cudnn kernels.limits zigzag ulysses gather ring kinds __init__",
    "data": "tables wording files formats hub sources tokenizers turns chat encoding text "
    "packing mixing rows held_out pipeline dataset account",
    "model": "config layers remat tiling decoder",
    "hf": "values rotation folder families published names tensors weights",
    "training": "host sharding loss optimizer xla pace step memory_fit digests checkpoint disk_space store records board "
    "metrics bad_steps material levers evaluator early_stopping selfcheck banner directory watchdog stopping saving log "
    "trainer",
    "planner": "progress gpus compiled memory budget hlo comms work timeline roofline plans search shapes report plots",
    "commands": "cli resume prepare library example train measure compare plan export eval launch",
}
"""The modules of a room in the order they build on each other: each imports only those before it, so there are no cycles."""

DOORS = ("jaxsp/attention/__init__.py",)
"""The only __init__.py with something in it."""

PRIVATE = ("jaxsp.attention.kernels.cudnn_calls", "jaxsp.runtime.distributed")
"""The only modules that may know what JAX keeps to itself: cuDNN's calls, and the keys and values that processes share."""

TOP_LEVEL = ("pyproject.toml", "README.md", "LICENSE", "configs", "scripts", "tests", "jaxsp", ".ci", ".git*")

DRAWERS = ("util", "utils", "helper", "helpers", "common", "misc")


def sources(repo: pathlib.Path, *folders: str) -> Iterator[pathlib.Path]:
    for folder in folders:
        yield from sorted((repo / folder).rglob("*.py"))


def imported(repo: pathlib.Path, file: pathlib.Path) -> set[str]:
    """Full names of what a file imports, anywhere in it: modules of jaxsp, or names as written of anything else."""
    package = file.relative_to(repo).parent.parts
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and node.attr == "_src":
            found.add(f"{ast.unparse(node.value)}._src")
    return {own_module(repo, name) if name.split(".")[0] == "jaxsp" else name for name in found}


def own_module(repo: pathlib.Path, name: str) -> str:
    """The file that an imported name of jaxsp comes from: `jaxsp.runtime.device_mesh.shape` is in `jaxsp.runtime.device_mesh`."""
    while name and not repo.joinpath(*name.split(".")).with_suffix(".py").exists():
        if repo.joinpath(*name.split("."), "__init__.py").exists():
            return f"{name}.__init__"
        name = name.rpartition(".")[0]
    return name


def place(module: str) -> tuple[int, str, int] | None:
    """Floor, room and place in the room of `jaxsp.room.module`; None if it has none."""
    room, _, name = module.removeprefix("jaxsp.").partition(".")
    if not name:
        room, name = "commands", room
    floor = next((number for number, rooms in enumerate(FLOORS) if room in rooms.split()), None)
    names = ["__init__", *PLACES.get(room, "").split()]
    names = names[1:] if "__init__" in names[1:] else names  # a door stands where the table says
    return (floor, room, names.index(name)) if floor is not None and name in names else None


def wrong_imports(repo: pathlib.Path) -> Iterator[str]:
    for file in sources(repo, "jaxsp"):
        module = ".".join(file.relative_to(repo).with_suffix("").parts)
        here, names = place(module), imported(repo, file)
        forbidden = r"torch\b" if module in PRIVATE else r"torch\b|jax\._src\b"
        yield from (f"{module} imports {name}" for name in names if re.match(forbidden, name))
        if file.name == "__init__.py" and not file.stat().st_size:
            continue
        if here is None:
            yield f"{module}: name its place in PLACES"
            continue
        for name in sorted(names):
            there = place(name) if name.startswith("jaxsp.") else None
            if there is None or there[0] < here[0] or (there[:2] == here[:2] and there[2] < here[2]):
                continue
            yield f"{module} imports {name}, which is not below it"


def wrong_files(repo: pathlib.Path) -> Iterator[str]:
    ignore = repo / ".gitignore"
    ignored = [line.rstrip("/") for line in ignore.read_text().splitlines()] if ignore.exists() else []
    for path in sorted(repo.iterdir()):
        if not any(fnmatch.fnmatch(path.name, known) for known in (*TOP_LEVEL, *ignored)):
            yield f"{path.name}: is not one of {', '.join(TOP_LEVEL)}"
    for file in sources(repo, "jaxsp", "tests", "scripts"):
        name = file.relative_to(repo)
        yield from (f"{name}: a drawer; name what is in it" for part in name.with_suffix("").parts if part in DRAWERS)
        if name.parts[0] == "jaxsp" and file.name == "__init__.py" and str(name) not in DOORS and file.stat().st_size:
            yield f"{name}: is not empty"


def tree(readme: str) -> dict[str, str]:
    """The paths of README's tree, in the fenced block with a line for jaxsp/, each with what is said about it."""
    for block in re.findall(r"^```.*?\n(.*?)^```", readme, re.DOTALL | re.MULTILINE):
        if not re.search(r"^\s*jaxsp/(\s|$)", block, re.MULTILINE):
            continue
        found, folders = {}, []
        for line in filter(str.strip, block.splitlines()):
            indent, (name, *words) = len(line) - len(line.lstrip()), line.split()
            folders = [(column, folder) for column, folder in folders if column < indent]
            path = (folders[-1][1] if folders else "") + name
            found[path] = " ".join(words)
            folders += [(indent, path)] if name.endswith("/") else []
        return found
    return {}


def wrong_tree(repo: pathlib.Path) -> Iterator[str]:
    readme = repo / "README.md"
    found = tree(readme.read_text(encoding="utf-8")) if readme.exists() else {}
    if not found:
        yield "README.md: has no fenced block with a line for jaxsp/"
        return
    for path, words in found.items():
        if not (repo / path).exists() or path.endswith("/") != (repo / path).is_dir():
            yield f"README.md: {path} does not exist"
        elif path.endswith(".py") and not words:
            yield f"README.md: {path} has no line that says what it is"
    for file in sources(repo, "jaxsp"):
        name = str(file.relative_to(repo))
        if file.stat().st_size and name not in found:
            yield f"README.md: {name} is not in the tree"


@pytest.mark.parametrize("check", [wrong_imports, wrong_files, wrong_tree])
def test_this_repository(check):
    assert list(check(REPO)) == []


BROKEN = [
    (
        wrong_imports,
        {"jaxsp/runtime/device_mesh.py": "import jaxsp.training.train_step"},
        "jaxsp.runtime.device_mesh imports jaxsp.training.train_step, which",
    ),
    (
        wrong_imports,
        {"jaxsp/model/layers.py": "def f():\n from ..hf import names"},
        "model.layers imports jaxsp.hf.names, which",
    ),
    (
        wrong_imports,
        {"jaxsp/core/axes.py": "from jaxsp.runtime.device_mesh import shape"},
        "core.axes imports jaxsp.runtime.device_mesh, which",
    ),
    (wrong_imports, {"jaxsp/core/axes.py": "from . import errors"}, "jaxsp.core.axes imports jaxsp.core.errors, which"),
    (
        wrong_imports,
        {"jaxsp/data/packing/row_reader.py": "from jaxsp import attention"},
        "data.rows imports jaxsp.attention.__init__, which",
    ),
    (
        wrong_imports,
        {"jaxsp/attention/ulysses.py": "from jaxsp import attention"},
        "attention.ulysses imports jaxsp.attention.__init__",
    ),
    (
        wrong_imports,
        {"jaxsp/training/train_step.py": "from jaxsp import train"},
        "jaxsp.training.train_step imports jaxsp.train, which",
    ),
    (wrong_imports, {"jaxsp/hf/names.py": "def f():\n  import torch.nn"}, "jaxsp.hf.names imports torch.nn"),
    (
        wrong_imports,
        {"jaxsp/runtime/device_mesh.py": "import jax\njax._src.mesh.x"},
        "jaxsp.runtime.device_mesh imports jax._src",
    ),
    (
        wrong_imports,
        {"jaxsp/runtime/device_mesh.py": "from jax._src import mesh"},
        "jaxsp.runtime.device_mesh imports jax._src.mesh",
    ),
    (wrong_imports, {"jaxsp/runtime/device_mesh.py": "from jax import _src"}, "jaxsp.runtime.device_mesh imports jax._src"),
    (wrong_imports, {"jaxsp/attention/kernels/packed.py": "from jax._src import mesh"}, "kernels.packed imports jax._src.mesh"),
    (wrong_imports, {"jaxsp/attention/kernels/cudnn.py": "import torch"}, "jaxsp.attention.kernels.cudnn imports torch"),
    (wrong_imports, {"jaxsp/core/colours.py": "x = 1"}, "jaxsp.core.colours: name its place in PLACES"),
    (wrong_imports, {"jaxsp/attic/errors.py": "x = 1"}, "jaxsp.attic.errors: name its place in PLACES"),
    (wrong_files, {"setup.py": "x = 1"}, "setup.py: is not one of"),
    (wrong_files, {"tests/utils.py": "x = 1"}, "tests/utils.py: a drawer"),
    (wrong_files, {"jaxsp/common/x.py": "x = 1"}, "jaxsp/common/x.py: a drawer"),
    (wrong_files, {"jaxsp/data/__init__.py": "x = 1"}, "jaxsp/data/__init__.py: is not empty"),
    (wrong_tree, {"README.md": "no tree"}, "README.md: has no fenced block"),
    (wrong_tree, {"jaxsp/core/new.py": "x = 1"}, "README.md: jaxsp/core/new.py is not in the tree"),
    (
        wrong_tree,
        {"README.md": "```\njaxsp/\n  train.py the command\n  core/\n    axes.py\n```"},
        "jaxsp/core/axes.py has no line",
    ),
    (wrong_tree, {"README.md": "```\njaxsp/\n  core/\n    mash.py the mesh\n```"}, "jaxsp/core/mash.py does not exist"),
]


@pytest.mark.parametrize(("check", "files", "says"), BROKEN)
def test_each_check_fails_on_a_tree_that_breaks_it(tmp_path, check, files, says):
    sound = {
        f"jaxsp/{name}.py": "x = 1" for name in ("train", "core/axes", "core/errors", "core/mesh", "training/step", "hf/names")
    }
    sound["jaxsp/attention/__init__.py"] = "from jaxsp.core import axes"
    sound["README.md"] = "```\njaxsp/\n" + "\n".join(f"  {path[6:]}  words" for path in sound) + "\n```"
    for name, text in sound.items():
        write(tmp_path / name, text)
    assert list(check(tmp_path)) == []
    for name, text in files.items():
        write(tmp_path / name, text)
    assert says in "\n".join(check(tmp_path))


def write(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
