"""The import rules of the three packages, checked in their sources and in fresh interpreters."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("scheduling", "pallas_kernels", "lorafusion_jax")
SERVICE = ("lorafusion_jax", "serve")
MAY_IMPORT = {  # besides the standard library
    "scheduling": {"scheduling", "numpy"},
    "pallas_kernels": {"pallas_kernels", "jax", "jaxlib", "jaxtyping", "numpy"},
}
NO_JAX = (
    "scheduling",
    "pallas_kernels.config_store",
    "pallas_kernels.cost_ops",
    "pallas_kernels.policy",
    "lorafusion_jax.errors",
    "lorafusion_jax.extend",
    "lorafusion_jax.config",
    "lorafusion_jax.data",
    "lorafusion_jax.adapters.spec",
    "lorafusion_jax.families.read",
    "lorafusion_jax.layout.extent",
    "lorafusion_jax.planning.planned",
    "lorafusion_jax.planning.memory",
    "lorafusion_jax.planning.prediction",
    "lorafusion_jax.planning.training_plan",
    "lorafusion_jax.cli.main",
    "lorafusion_jax.api.plans",
    "lorafusion_jax.serve.server",
    "lorafusion_jax.serve.control.child_process",
    "lorafusion_jax.serve.client",
)
OPTIONAL = {
    "huggingface_hub",
    "datasets",
    "wandb",
    "tensorboardX",
    "mlflow",
    "trackio",
}  # extras, imported where they are used
NOTEBOOK = {"IPython"}  # imported in notebooks only, where it runs already
PACKAGES_OF_A_RUN = {"jaxlib"}  # recorded by version, never imported
FILLERS = {"own", "found", "here", "said", "each", "one", "it", "what", "place"}  # name nothing; say what the thing is
FILLERS |= {"given", "whole", "there", "again", "ours", "theirs"}
ERRORS = (
    "lorafusion_jax/errors.py",
    "scheduling/errors.py",
    "lorafusion_jax/serve/api/problems.py",
)  # what, where, why, fix
PLACES = (  # the fixed places of a session, in which adapters start and stop: a term, and so a noun of these rooms
    "lorafusion_jax/session",
    "lorafusion_jax/config/places",
    "lorafusion_jax/config/stack",
    "lorafusion_jax/serve",
)
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
FORBIDDEN_CALLS = {"eval", "exec"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb"}

PATHS = [path.relative_to(ROOT) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
INITS = [".".join(path.parent.parts) for path in PATHS if path.name == "__init__.py"]


@cache
def trees() -> dict[Path, ast.Module]:
    """Parsed where they are looked at, not by every worker that collects this file."""
    return {path: ast.parse((ROOT / path).read_text(encoding="utf-8")) for path in PATHS}


@cache
def nodes_of_files() -> dict[Path, list[ast.AST]]:
    """Nodes that a test looks at: one in ten, and every test goes through all."""
    return {path: [node for node in ast.walk(tree) if looked_at(node)] for path, tree in trees().items()}


def looked_at(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id in FILLERS
    if isinstance(node, ast.Attribute):
        return node.attr in ENVIRONMENT
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS
    kinds = ast.Import | ast.ImportFrom | ast.alias | ast.arg | ast.keyword | ast.Global | ast.ClassDef
    return isinstance(node, kinds)


def imported(nodes: list[ast.AST]) -> set[str]:
    """Top-level names of everything that a file imports, also inside functions and for type checkers."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add((node.module or "").split(".")[0])
    return names - set(sys.stdlib_module_names)


def places(find) -> list[str]:
    """file:line of every node that `find` picks."""
    return [f"{path}:{node.lineno}" for path, nodes in nodes_of_files().items() for node in nodes if find(node)]


def fresh(code: str) -> str:
    """What a new interpreter prints that runs `code` in the repository."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_lower_packages_import_only_what_they_may(package):
    extra = {
        str(path): names
        for path, nodes in nodes_of_files().items()
        if path.parts[0] == package and (names := imported(nodes) - MAY_IMPORT[package])
    }
    assert not extra


def test_plans_do_not_depend_on_a_clock():
    planners = [path for path in PATHS if path.parts[0] == "scheduling" or path.parts[1] == "planning"]
    clocks = [(path, node) for path in planners for node in nodes_of_files()[path] if _imports(node, "time")]
    assert planners
    assert [f"{path}:{node.lineno}" for path, node in clocks] == []


def _imports(node: ast.AST, module: str) -> bool:
    if isinstance(node, ast.Import):
        return module in {alias.name for alias in node.names}
    return isinstance(node, ast.ImportFrom) and node.module == module


@cache
def imports() -> dict[str, list[str]]:
    """What one interpreter tells of importing everything: first what planning needs, then the rest."""
    modules = [
        ".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in PATHS if path.name != "__main__.py"
    ]
    code = f"""
import importlib, json, sys
with_jax = []
for name in {NO_JAX!r}:
    importlib.import_module(name)
    with_jax += [name] if {{"jax", "flax"}} & set(sys.modules) else []
import jax
import flax.nnx, optax, orbax.checkpoint  # what others change is not our doing
before = dict(jax.config.values)
import lorafusion_jax.training
language = "jax.experimental.pallas.mosaic_gpu" in sys.modules
for name in {modules!r}:
    importlib.import_module(name)
from jax.extend.backend import backends as _
from jax._src import xla_bridge
changed = [key for key, value in jax.config.values.items() if before.get(key) != value]
backends = list(xla_bridge._backends)
print(json.dumps({{"with jax": with_jax, "language of kernels": language, "changed": changed, "backends": backends}}))
"""
    return json.loads(fresh(code))


def test_what_planning_needs_does_not_import_jax():
    """One after another: the first module that does is the first in the list."""
    assert imports()["with jax"] == []


def test_what_trains_imports_no_language_of_kernels_before_it_needs_one():
    """Mosaic GPU takes a quarter of a second to import, in every command and on every device."""
    assert not imports()["language of kernels"]


def test_imports_start_no_backend_and_leave_the_settings_of_jax_alone():
    assert imports()["changed"] == []
    assert imports()["backends"] == []


def test_every_folder_is_a_package_that_says_what_it_is():
    folders = {path.parent for path in PATHS}
    assert [str(folder) for folder in sorted(folders) if folder / "__init__.py" not in PATHS] == []
    assert [
        str(path) for path, tree in trees().items() if path.name == "__init__.py" and not ast.get_docstring(tree)
    ] == []


def test_no_pickle_eval_or_exec():
    assert {str(path) for path, nodes in nodes_of_files().items() if imported_all(nodes) & FORBIDDEN_IMPORTS} == set()
    assert (
        places(
            lambda node: isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in FORBIDDEN_CALLS
        )
        == []
    )
    assert (
        places(
            lambda node: isinstance(node, ast.keyword)
            and node.arg == "allow_pickle"
            and not (isinstance(node.value, ast.Constant) and node.value.value is False)
        )
        == []
    )


def imported_all(nodes: list[ast.AST]) -> set[str]:
    nodes = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    return {alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names} | {
        (node.module or "").split(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)
    }


def test_no_behaviour_by_environment_variable():
    """But for XLA and CUDA, which take what holds for a whole process no other way."""
    uses = places(
        lambda node: (isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT)
        or (isinstance(node, ast.alias) and node.name in ENVIRONMENT)
    )
    lines = {line: (ROOT / line.partition(":")[0]).read_text().splitlines() for line in uses}
    named = ('"XLA_FLAGS"', '"CUDA_VISIBLE_DEVICES"')
    told = {line: lines[line][int(line.partition(":")[2]) - 1] for line in uses}
    assert [line for line, text in told.items() if not any(name in text for name in named)] == []
    assert {line.partition(":")[0] for line in uses} == {
        "lorafusion_jax/machine.py",
        "lorafusion_jax/session/ahead.py",
        "lorafusion_jax/session/stage_jit.py",
    }


def test_one_short_function_shows_the_acts_of_a_step_in_order():
    from lorafusion_jax.session.loop import Loop

    (function,) = ast.parse(textwrap.dedent(inspect.getsource(Loop.run))).body
    assert isinstance(function, ast.FunctionDef)
    statements = function.body[1:]  # after its docstring
    assert statements[-1].end_lineno - statements[0].lineno < 40
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    acts = {call.attr for call in calls if isinstance(call, ast.Attribute)}
    assert acts >= {"admit", "issue", "close_batch", "report"}


def test_the_worker_has_no_training_loop_of_its_own():
    """It drives a session; the loop and the steps are those of runs."""
    worker = [path for path in PATHS if path.parent.parts[-1] == "worker"]
    assert worker
    rooms = ("lorafusion_jax.training", "lorafusion_jax.session.loop", "lorafusion_jax.session.executor")
    imports = [
        (path, node.module or "")
        for path in worker
        for node in nodes_of_files()[path]
        if isinstance(node, ast.ImportFrom)
    ]
    assert [f"{path}: {module}" for path, module in imports if module.startswith(rooms)] == []


def test_runs_jobs_of_a_service_and_calls_share_one_middle():
    middle = {"OpenSession", "PagedSession", "Loop", "Steps", "BatchEnds", "Assembler", "AdapterState", "AdapterExport"}
    classes = [
        (node.name, str(path))
        for path, nodes in nodes_of_files().items()
        for node in nodes
        if isinstance(node, ast.ClassDef) and node.name in middle
    ]
    assert sorted(name for name, _ in classes) == sorted(middle)
    assert all("session/" in path for _, path in classes)
    bases = [
        (getattr(base, "id", ""), node.name)
        for nodes in nodes_of_files().values()
        for node in nodes
        if isinstance(node, ast.ClassDef)
        for base in node.bases
    ]
    made_of = {"OpenSession", "PagedSession"}
    assert sorted(pair for pair in bases if pair[0] in made_of) == [
        ("OpenSession", "PagedSession"),
        ("PagedSession", "Session"),
    ]


def test_imports_are_absolute():
    assert places(lambda node: isinstance(node, ast.ImportFrom) and bool(node.level)) == []


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "tests"])
def test_programs_beside_the_product_import_modules_that_exist(folder):
    """A moved module breaks a benchmark or an example at its first use only."""
    ours = "|".join((*PACKAGES, "benchmarks"))
    imports = re.compile(rf"^ *from ((?:{ours})[\w.]*) import ", re.MULTILINE)
    for file in sorted((ROOT / folder).rglob("*.py")):
        for module in set(imports.findall(file.read_text(encoding="utf-8"))):
            path = ROOT.joinpath(*module.split("."))
            assert path.is_dir() or path.with_suffix(".py").is_file(), f"{file}: no module {module}"


def test_no_global_statement():
    assert places(lambda node: isinstance(node, ast.Global)) == []


def test_variables_name_the_thing():
    """Fields of records are read with their owner, as `error.what`, and those of errors are parameters, too."""
    fields = {
        id(statement.target)
        for nodes in nodes_of_files().values()
        for node in nodes
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
    }

    def name_of(node: ast.AST) -> str:
        return node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else ""

    def named(names: set[str], but: tuple[str, ...]) -> list[str]:
        uses = places(lambda node: name_of(node) in names and id(node) not in fields)
        return [line for line in uses if not line.startswith(but)]

    assert named(FILLERS - {"what", "place"}, but=()) == []
    assert named({"what"}, but=ERRORS) == []
    assert named({"place"}, but=PLACES) == []


@pytest.mark.parametrize("package", INITS)
def test_public_names_are_documented(package):
    module = importlib.import_module(package)
    things = {name: getattr(module, name) for name in public_names(package)}
    made = re.compile(r"^\w+\(.*\)$", re.DOTALL)  # what a dataclass gets when nobody writes one
    assert [
        name
        for name, thing in things.items()
        if (inspect.isclass(thing) or inspect.isfunction(thing))
        and (not thing.__doc__ or made.match(thing.__doc__.strip()))
    ] == []


def public_names(package: str) -> Iterator[str]:
    """Names that an `__init__` offers: its `__all__`, and what it imports under its own name ("x as x")."""
    yield from getattr(importlib.import_module(package), "__all__", ())
    yield from public_names_of(trees()[Path(*package.split("."), "__init__.py")])


def public_names_of(tree: ast.Module) -> Iterator[str]:
    """Names that a file imports under their own name ("x as x")."""
    yield from (
        alias.asname
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname and alias.asname == alias.name
    )


IMPORTED_BY_JAX = {"flatbuffers"}  # where this package calls it


def test_dependencies_are_what_is_imported_or_recorded_with_a_run():
    def needed(service: bool) -> set[str]:
        files = [nodes for path, nodes in nodes_of_files().items() if (path.parts[:2] == SERVICE) == service]
        used = set().union(*map(imported, files)) - set(PACKAGES) - OPTIONAL - NOTEBOOK
        return {normal(owners[name][0]) for name in used}

    def listed(lines: list[str]) -> set[str]:
        return {normal(re.split(r"[<>=\[ ]", line)[0]) for line in lines}

    owners = packages_distributions()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    main = needed(service=False) | {normal(name) for name in PACKAGES_OF_A_RUN} | IMPORTED_BY_JAX
    assert listed(project["dependencies"]) == main
    assert listed(project["optional-dependencies"]["serve"]) == needed(service=True) - main


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_lock_pins_with_hashes_and_names_no_host_or_path():
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    pins = re.findall(r"^([\w.-]+)(?:\[[\w,-]+\])?==\S+", lock, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    direct = {
        normal(re.split(r"[<>=\[ ]", line)[0])
        for line in project["project"]["dependencies"] + project["dependency-groups"]["dev"]
    }
    assert direct <= {normal(name) for name in pins}
    assert lock.count("--hash=sha256:") >= len(pins)
    assert not re.search(r"://|^-|/(tmp|home|root|opt)/", lock, re.MULTILINE)


def test_the_lock_of_the_product_is_the_first_part_of_the_lock():
    needed, tools, _ = (ROOT / "requirements.lock").read_text(encoding="utf-8").partition("# Tools of a checkout:\n")
    pins = {normal(name) for name in re.findall(r"^([\w.-]+)(?:\[[\w,-]+\])?==", needed, re.MULTILINE)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    direct = {normal(re.split(r"[<>=\[ ]", line)[0]) for line in project["project"]["dependencies"]}
    assert tools, "make lock sorts it"
    assert direct <= pins
    assert "pytest" not in pins


def test_the_changelog_begins_with_this_version():
    heads = re.findall(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert heads[0] == importlib.import_module("lorafusion_jax").__version__


def test_what_packages_extend_is_in_one_module():
    extend = importlib.import_module("lorafusion_jax.extend")
    names = {
        "AdapterKind",
        "ArraySpec",
        "Family",
        "Leaf",
        "Objective",
        "Optimizer",
        "Schedule",
        "Segment",
        "StoredKind",
    }
    assert set(public_names_of(trees()[Path("lorafusion_jax/extend.py")])) >= names
    assert all(inspect.isclass(getattr(extend, name)) for name in names)
