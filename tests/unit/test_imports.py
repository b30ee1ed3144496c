"""What importing the package costs, and which folder may import which."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

import gpipe_lab

ROOT = Path(gpipe_lab.__file__).parent
LEVEL = {"plan": 0, "planner": 1, "engine": 2, "lab": 3, "tools": 5}
LEAF = 4  # view, course and the like: no other folder imports them but tools
COMMAND = 6  # what is run as python -m gpipe_lab.NAME may import everything
HEAVY = ("torch", "matplotlib", "pandas", "ipywidgets", "numpy", "IPython", "cloudpickle")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imported(name: str, node: ast.stmt) -> list[str]:
    """The modules that an import statement in module `name` brings in: the package's own by full name."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        package = name.split(".") if PATHS[name].name == "__init__.py" else name.split(".")[:-1]
        package = package[: len(package) - node.level + 1]
        base = ".".join([*package, *([node.module] if node.module else [])])
    submodules = [f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}" in PATHS]
    others = any(f"{base}.{alias.name}" not in PATHS for alias in node.names)
    return submodules + ([base] if others or not submodules else [])


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(name: str, *, inside_functions: bool = True, for_types: bool = True) -> set[str]:
    """What module `name` imports, and whether what only functions or type hints import counts."""

    def statements(node: ast.AST) -> Iterator[ast.stmt]:
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            if (is_function and not inside_functions) or (is_for_types(child) and not for_types):
                continue
            yield child  # type: ignore[misc]
            yield from statements(child)

    tree = ast.parse(PATHS[name].read_text())
    return {module for node in statements(tree) for module in imported(name, node)}


def own_imports(name: str, *, for_types: bool = True) -> set[str]:
    return {module for module in imports(name, for_types=for_types) if module in PATHS and module != name}


def folder(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def test_imports_of_the_package_are_found():
    assert "gpipe_lab.plan.validate" in own_imports("gpipe_lab")
    assert "gpipe_lab.plan.schedule" in own_imports("gpipe_lab.plan.lowering")


def test_no_cycles():
    remaining = {name: own_imports(name, for_types=False) for name in PATHS}
    while remaining:
        free = [name for name, sources in remaining.items() if not sources & remaining.keys()]
        assert free, f"these import each other in a circle: {sorted(remaining)}"
        for name in free:
            del remaining[name]


def level(folder_name):
    is_command = (
        f"gpipe_lab.{folder_name}" in PATHS and PATHS[f"gpipe_lab.{folder_name}"].name != "__init__.py"
    )
    return COMMAND if is_command else LEVEL.get(folder_name, LEAF)


def test_folders_import_downward_only():
    for name in PATHS:
        own = folder(name)
        for source in own_imports(name):
            other = folder(source)
            if not own or not other or own == other:
                continue
            assert level(other) < level(own), f"{name} imports {source}"


def test_plan_is_pure_python():
    for name in PATHS:
        if folder(name) not in ("plan", "planner"):
            continue
        for module in imports(name):
            known = folder(module) in ("plan", "planner") or module == "pandas"
            assert known or module.split(".")[0] in sys.stdlib_module_names, f"{name} imports {module}"
        assert "pandas" not in imports(name, inside_functions=False, for_types=False)  # frame() alone


def test_views_reach_for_the_lab_only_when_they_run_something():
    for name in PATHS:
        if folder(name) == "view":
            at_once = imports(name, inside_functions=False, for_types=False)
            assert not any(folder(module) == "lab" for module in at_once if module in PATHS), name


def test_torch_is_left_to_the_engine_and_the_lab():
    for name in PATHS:
        if folder(name) in ("", "view"):
            at_once = imports(name, inside_functions=False, for_types=False)
            assert not any(module.split(".")[0] == "torch" for module in at_once), name


def test_the_forkserver_is_started_before_torch_is_imported():
    """It imports torch while the driver does, and a first lab waits for one of them, not for both in turn."""
    code = "import sys; import gpipe_lab.lab.forkserver; print('torch' in sys.modules)"
    assert python(code).split() == ["False"]


def knows_cuda(tree: ast.AST) -> Iterator[str]:
    """What in a module goes by CUDA: torch's module of that name, a tensor's flag, or the word as a value."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda", "CUDA"):
            yield f"line {node.lineno}: .{node.attr}"
        is_text = (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        )
        if is_text and "cuda" in node.value.lower() and not node.value.isupper():
            yield f"line {node.lineno}: {node.value!r}"


def test_one_module_knows_cuda():
    found = {
        name: list(knows_cuda(ast.parse(path.read_text())))
        for name, path in PATHS.items()
        if folder(name) in ("plan", "engine", "lab", "train")
    }
    assert len(found.pop("gpipe_lab.engine.device")) > 20
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_NVML_BASED_CUDA_CHECK"}  # set, not asked about
    assert environment <= {node.value for node in constants("gpipe_lab.lab.workers")}
    assert {name: lines for name, lines in found.items() if lines} == {}


def constants(name: str) -> Iterator[ast.Constant]:
    return (node for node in ast.walk(ast.parse(PATHS[name].read_text())) if isinstance(node, ast.Constant))


def python(code: str) -> str:
    """What a fresh process prints that finds the package where this one has found it."""
    path = f"import sys; sys.path.insert(0, {str(ROOT.parent)!r})\n"
    command = [sys.executable, "-c", path + code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.alone
def test_importing_the_package_is_fast_and_light():
    code = (  # the process's own time, so that a busy machine does not count
        "import time; start = time.process_time()\n"
        "import gpipe_lab; took = time.process_time() - start\n"
        f"print(took, *[name for name in {HEAVY} if name in sys.modules])"
    )
    runs = [python(code).split() for _ in range(5)]
    assert [run[1:] for run in runs] == [[]] * 5
    seconds = median(float(run[0]) for run in runs)
    assert seconds < 0.1, f"import gpipe_lab took {seconds:.3f} s"


def test_planning_needs_nothing_heavy():
    code = (
        "import gpipe_lab as gl; s = gl.with_recompute(gl.gpipe(4, 8), 'always')\n"
        "t = gl.simulate(gl.lower(s)); str(s); t.bubble_fraction; gl.peak_in_flight(s)\n"
        "gl.simulate_memory(t, [gl.StageBytes(saved=2, boundary=1)] * 4).peak_bytes(0); dir(gl)\n"
        f"print(*[name for name in {HEAVY} if name in sys.modules])"
    )
    assert python(code).split() == []


def test_public_names_exist():
    for name in [
        "naive", "forward_only", "gpipe", "one_f_one_b", "interleaved", "zero_bubble_h1", "zero_bubble_h2",
        "zero_bubble_v", "SCHEDULES", "with_recompute", "validate", "simulate", "lower", "search",
        "from_csv", "to_csv",
        "Costs", "Schedule", "ScheduleError", "InputError", "Trace", "Event", "MemoryReport",
        "peak_in_flight", "Kind", "Op",
    ]:  # fmt: skip
        assert name in dir(gpipe_lab) and getattr(gpipe_lab, name) is not None
    assert sorted(set(gpipe_lab.__all__)) == sorted(gpipe_lab.__all__)


def test_every_schedule_is_found_under_its_name():
    for name, constructor in gpipe_lab.SCHEDULES.items():
        assert getattr(gpipe_lab, name) is constructor and name in gpipe_lab.__all__
