"""The layout of the source: imports go one way, names are unique, files are short."""

import ast
import graphlib
from collections import defaultdict
from pathlib import Path

import selfnorm

SOURCE = Path(selfnorm.__file__).parent
# Each package or root module may import those before it.
ORDER = [
    "runtime",
    "linalg",
    "kernels",
    "bijection",
    "accurate",
    "base",
    "flow",
    "layers",
    "models",
    "penalties",
    "objective",
    "data",
    "report",
    "evaluate",
    "train",
    "estimator",
    "compare",
    "bench",
    "cli",
]
# They re-export the library and start the command.
EXEMPT = {"__init__", "__main__"}
# Names that several modules may define, with the reason why.
SAME_NAMES: dict[str, str] = {}
NO_CUDA = ("accurate", "base", "bijection", "flow", "models", "objective", "penalties", "estimator", "runtime.context")


def modules():
    """Each module's dotted name below `selfnorm`, and its syntax tree."""
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        yield ".".join(parts), ast.parse(path.read_text(encoding="utf-8"))


def imported(nodes):
    """The modules of selfnorm that are imported among these nodes, as dotted names below `selfnorm`."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "selfnorm":
            base = node.module.removeprefix("selfnorm").lstrip(".")
            for alias in node.names:
                below = f"{base}.{alias.name}".lstrip(".")
                path = SOURCE / below.replace(".", "/")
                yield below if path.is_dir() or path.with_suffix(".py").exists() else base
        elif isinstance(node, ast.Import):
            yield from (name.name.removeprefix("selfnorm.") for name in node.names if name.name.startswith("selfnorm."))


def test_imports_go_one_way():
    wrong = []
    for name, tree in modules():
        package = name.split(".")[0]
        if package in EXEMPT:
            continue
        for target in filter(None, imported(ast.walk(tree))):  # lazy imports and those for types count, too
            other = target.split(".")[0]
            if ORDER.index(other) > ORDER.index(package):
                wrong.append(f"{name} imports {target}")
    assert wrong == []


def test_every_package_has_a_place_in_the_order():
    assert set(ORDER) == {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir()} - EXEMPT - {
        "__pycache__"
    }


def test_no_module_imports_itself_by_a_detour():
    graph = {name: {target for target in imported(tree.body) if target != name} for name, tree in modules() if name not in EXEMPT}
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_the_contract_knows_no_cuda():
    texts = {name: (SOURCE / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8") for name in NO_CUDA}
    assert [name for name, text in texts.items() if "torch.cuda" in text or "import triton" in text] == []
    tree = dict(modules())["bijection"]
    assert set(imported(ast.walk(tree))) == {"runtime.checks", "runtime.context"}


def test_names_are_defined_once():
    places = defaultdict(list)
    for name, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("__"):
                places[node.name].append(name)
    assert {name: where for name, where in places.items() if len(where) > 1 and name not in SAME_NAMES} == {}


def test_files_are_short_and_the_root_is_small():
    lengths = {str(path.relative_to(SOURCE)): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCE.rglob("*.py")}
    assert {name: lines for name, lines in lengths.items() if lines > 350} == {}
    assert len([name for name in lengths if "/" not in name and Path(name).stem not in EXEMPT]) <= 8
