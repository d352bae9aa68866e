"""Who may import whom, and what the deterministic half must never touch, read from the syntax tree."""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Final

from scenarios.tidy import FUNCTION, Source, dotted

VOCABULARY: Final = frozenset({"units", "config", "keys", "messages", "facts"})
_WEB: Final = frozenset(
    {"aiohttp", "fastapi", "flask", "grpc", "http", "httpx", "requests", "socketserver"}
    | {"starlette", "uvicorn", "zmq"}
)
_EVERYTHING_BUT_SERVE: Final = frozenset(
    {"vocabulary", "core", "cluster", "workload", "storage", "cuda_numba", "memory", "model", "run"}
)

# Files that may load parts of this repository when they are called for.
LOADS_LATE: Final = {
    "refimpl/cli/bench.py": frozenset({"refimpl"}),
    "refimpl/cli/golden.py": frozenset({"refimpl"}),
    "refimpl/cli/run.py": frozenset({"refimpl"}),
    "refimpl/cli/serve.py": frozenset({"refimpl"}),
    "refimpl/cli/storage.py": frozenset({"refimpl"}),
    "cuda_numba/backend.py": frozenset({"cuda_numba"}),
    # Plots need plotly, and a check without a page starts without it.
    "refimpl/run/golden_report.py": frozenset({"refimpl"}),
    # Only classes of SGLang's kind need tensors; any other is certified without torch.
    "refimpl/conformance/subject.py": frozenset({"refimpl"}),
    "refimpl/storage/aibrix.py": frozenset({"torch"}),
}
# Client libraries whose own interface is tensors: the backend may name their types, inside functions.
TENSOR_CLIENTS: Final = frozenset({"refimpl/storage/aibrix.py"})


@dataclass(frozen=True)
class Allowed:
    """What the files of one folder may import beside each other and the standard library."""

    internal: frozenset[str] = frozenset()
    external: frozenset[str] | None = frozenset()  # None: anything
    never: frozenset[str] = frozenset()


_WORDS: Final = frozenset({"vocabulary"})
TABLE: Final = {
    "vocabulary": Allowed(external=frozenset({"msgspec"})),
    "core": Allowed(_WORDS),
    "cluster": Allowed(_WORDS),
    "workload": Allowed(_WORDS, frozenset({"msgspec"})),  # reads traces, digests workloads
    # A backend imports its client library, whatever that is; tensors are not its business.
    "storage": Allowed(_WORDS, None, frozenset({"torch", "numba"})),
    # llvmlite is numba's own: what stands in a kernel beside numba is written in its terms.
    "cuda_numba": Allowed(external=frozenset({"numpy", "numba", "llvmlite"})),
    "memory": Allowed(_WORDS | {"cuda_numba"}, frozenset({"torch", "numpy"})),
    "model": Allowed(_WORDS | {"memory"}, None, _WEB),
    "run": Allowed(_EVERYTHING_BUT_SERVE, None, _WEB),
    "conformance": Allowed(_WORDS | {"storage", "memory", "run"}, None, _WEB),
    "serve": Allowed(_EVERYTHING_BUT_SERVE | {"conformance"}, None),
    # geventhttpclient is the client that Locust itself brings.
    "perf": Allowed(
        _WORDS | {"workload"},
        frozenset({"msgspec", "locust", "gevent", "geventhttpclient", "zmq", "polars", "rich"}),
    ),
    "cli": Allowed(_EVERYTHING_BUT_SERVE | {"conformance", "serve"}, None),
    "__main__": Allowed(_WORDS | {"cli", "cluster", "storage"}, frozenset({"typer"})),
}

PURE: Final = frozenset({"vocabulary", "core", "cluster", "workload"})
# Clocks, chance, threads and the outside world: what makes two runs of one input differ.
IMPURE_MODULES: Final = frozenset(
    {"time", "random", "secrets", "uuid", "threading", "multiprocessing", "concurrent", "queue"}
    | {"asyncio", "logging", "os", "socket", "subprocess", "torch", "numpy"}
)
IMPURE_CALLS: Final = frozenset({"open", "print", "hash"})

# Third-party modules that may be imported where they are used, because they may not be installed.
# polars is installed, but slow to load and needed only when a table is written.
OPTIONAL_CLIENTS: Final = frozenset(
    {"aibrix_kvcache", "hf3fs_fuse", "hf3fs_py_usrbio", "mooncake", "nixl", "nixl_cu12", "polars"}
    | {"gguf", "jinja2", "plotly", "safetensors", "tokenizers"}
)
# Tensors, and who may touch them: everything else has to run where they are not installed.
TENSORS: Final = frozenset({"torch", "safetensors", "gguf"})
TENSOR_FILES: Final = (
    "refimpl/memory/",
    "refimpl/model/",
    "refimpl/run/hands",
    "refimpl/run/bench_bytes",
    "refimpl/run/host_pool_view",
    "refimpl/run/rank_process",
    "refimpl/run/rank_setup",
)


@dataclass(frozen=True)
class Import:
    """One imported module. ``name`` is what is taken from it: an attribute, or a module below it."""

    module: str
    name: str
    node: ast.stmt


def imports(source: Source, nodes: list[ast.AST] | None = None) -> Iterator[Import]:
    for node in source.nodes if nodes is None else nodes:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, "", node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(source.path, node)
            yield from (Import(module, alias.name, node) for alias in node.names)


def _absolute(path: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = path.split("/")[: -node.level]
    return ".".join(package + ([node.module] if node.module else []))


# ---- the table ----------------------------------------------------------------------------------


def folder_of(path: str) -> str:
    """The row of the table a file belongs to; the name of its folder where there is no row."""
    parts = path.removesuffix(".py").split("/")
    if parts[0] != "refimpl":
        return parts[0]
    if len(parts) > 2:
        return parts[1]
    return "vocabulary" if parts[-1] in VOCABULARY | {"__init__"} else parts[-1]


def _folder_of_import(imported: Import) -> str:
    module = imported.module
    if module == "refimpl" and imported.name:
        module = f"refimpl.{imported.name}"
    top, _, rest = module.partition(".")
    first = rest.partition(".")[0]
    return top if top != "refimpl" else "vocabulary" if first in VOCABULARY | {""} else first


def forbidden_imports(source: Source) -> list[str]:
    """Imports that the table does not grant."""
    folder = folder_of(source.path)
    if folder not in TABLE:
        return [source.problem(1, f"{folder} has no row in the import table")]
    found = []
    for imported in imports(source):
        target = _folder_of_import(imported)
        if _is_of_a_tensor_client(source, imported):
            continue
        if target != folder and not _is_granted(TABLE[folder], imported.module, target):
            found.append(
                source.problem(imported.node, f"{folder} must not import {imported.module}")
            )
    return found


def _is_granted(allowed: Allowed, module: str, target: str) -> bool:
    top = module.partition(".")[0]
    if top in allowed.never:
        return False
    if top in {"refimpl", "cuda_numba", "perf", "scenarios"}:
        return target in allowed.internal
    if top in sys.stdlib_module_names:
        return True
    return allowed.external is None or top in allowed.external


def heavy_imports(source: Source) -> list[str]:
    """Tensor libraries outside the packages that are about bytes."""
    if source.path.startswith(TENSOR_FILES):
        return []
    return [
        source.problem(imported.node, f"{imported.module} belongs into {', '.join(TENSOR_FILES)}")
        for imported in imports(source)
        if imported.module.partition(".")[0] in TENSORS
        and not _is_of_a_tensor_client(source, imported)
    ]


def _is_of_a_tensor_client(source: Source, imported: Import) -> bool:
    """torch, in a function of a backend whose client takes tensors."""
    if source.path not in TENSOR_CLIENTS or imported.module != "torch":
        return False
    inside = (node for function in source.functions for node in ast.walk(function))
    return any(node is imported.node for node in inside)


def local_imports(source: Source) -> list[str]:
    """Imports inside functions, but for optional clients.

    The command line may load what a command needs when that command runs: a simulation has to start
    where torch is not installed. Likewise the CUDA half of the kernels waits for its first call.
    """
    inside = [node for function in source.functions for node in ast.walk(function)]
    unique = list({id(node): node for node in inside}.values())
    may_be_late = OPTIONAL_CLIENTS | LOADS_LATE.get(source.path, frozenset())
    return [
        source.problem(imported.node, f"import {imported.module} at the top of the file")
        for imported in imports(source, unique)
        if imported.module.partition(".")[0] not in may_be_late
    ]


def hidden_imports(source: Source) -> list[str]:
    """Uses of TYPE_CHECKING: a module that is imported for its types alone hides a cycle."""
    return [
        source.problem(node, "TYPE_CHECKING hides an import")
        for node in source.nodes
        if (isinstance(node, ast.ImportFrom) and any(a.name == "TYPE_CHECKING" for a in node.names))
        or dotted(node).endswith(".TYPE_CHECKING")
    ]


def import_cycle(files: list[Source]) -> list[str]:
    """Modules of one cycle, the first one again at its end; empty when there is none."""
    modules = {module_name(source.path): source for source in files}
    graph = {
        module: {_target(imported, modules.keys()) for imported in imports(source)} - {"", module}
        for module, source in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _target(imported: Import, modules: Collection[str]) -> str:
    """The module of ours that is imported; empty when it is none of ours."""
    candidates = (f"{imported.module}.{imported.name}", imported.module)
    return next((name for name in candidates if name in modules), "")


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


# ---- purity -------------------------------------------------------------------------------------


def impurities(source: Source) -> list[str]:
    """What vocabulary, core, cluster and workload must not contain; nothing for other folders."""
    folder = folder_of(source.path)
    if folder not in PURE:
        return []
    found = [
        source.problem(imported.node, f"{folder} must not import {imported.module}")
        for imported in imports(source)
        if imported.module.partition(".")[0] in IMPURE_MODULES
    ]
    # Traces are files, and reading them is what workload/trace is for.
    calls = IMPURE_CALLS - ({"open"} if source.path.startswith("refimpl/workload/trace") else set())
    found += [
        source.problem(node, f"{folder} must not call {dotted(node.func)}()")
        for node in source.nodes
        if isinstance(node, ast.Call) and dotted(node.func) in calls
    ]
    return found + floats(source) + set_orders(source)


def floats(source: Source) -> list[str]:
    """Float literals, the name ``float`` and true division. ``isinstance(x, float)`` may refuse one."""
    refused = {
        id(inner)
        for node in source.nodes
        if isinstance(node, ast.Call) and dotted(node.func) == "isinstance"
        for inner in ast.walk(node)
    }
    joins_paths = source.path.startswith("refimpl/workload/")
    return [
        source.problem(node, "integers only: this is or makes a float")
        for node in source.nodes
        if (isinstance(node, ast.Constant) and isinstance(node.value, float))
        or (isinstance(node, ast.Name) and node.id == "float" and id(node) not in refused)
        or (_divides(node) and not (joins_paths and not _has_number(node)))
    ]


def _divides(node: ast.AST) -> bool:
    return isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.Div)


def _has_number(node: ast.AST) -> bool:
    """Whether an operand is a literal number, which no path is joined with."""
    return any(
        isinstance(child, ast.Constant) and isinstance(child.value, int)
        for child in ast.iter_child_nodes(node)
    )


def set_orders(source: Source) -> list[str]:
    """Places where the order of a set, which differs between runs, becomes the order of something.

    Sets are recognised by how they are made or annotated in the same file. Building another set, or
    sorting, keeps no order and is fine.
    """
    known = {name for node in source.nodes for name in _names_of_sets(node)}
    return [
        source.problem(ordered, "a set has no order: sort it, or use a dict")
        for node in source.nodes
        for ordered in _takes_order_of(node)
        if _is_set(ordered, known)
    ]


def _takes_order_of(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, (ast.For, ast.AsyncFor)):
        return [node.iter]
    if isinstance(node, (ast.ListComp, ast.DictComp)):
        return [generator.iter for generator in node.generators]
    if isinstance(node, ast.Starred):
        return [node.value]
    if not isinstance(node, ast.Call):
        return []
    if dotted(node.func) in {"list", "tuple", "iter", "enumerate", "zip", "map", "filter"}:
        return node.args
    if isinstance(node.func, ast.Attribute) and node.func.attr == "pop" and not node.args:
        return [node.func.value]
    return []


def _names_of_sets(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Assign) and _is_set(node.value, set()):
        return [dotted(target) for target in node.targets if dotted(target)]
    if isinstance(node, ast.AnnAssign) and _is_set_type(node.annotation):
        return [dotted(node.target)]
    if isinstance(node, FUNCTION):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        return [each.arg for each in arguments if each.annotation and _is_set_type(each.annotation)]
    return []


def _is_set_type(annotation: ast.expr) -> bool:
    base = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    return dotted(base).rpartition(".")[2] in {
        "set",
        "frozenset",
        "Set",
        "AbstractSet",
        "MutableSet",
    }


def _is_set(node: ast.expr, known: set[str]) -> bool:
    if isinstance(node, (ast.Set, ast.SetComp)):
        return True
    if isinstance(node, ast.Call):
        return dotted(node.func) in {"set", "frozenset"}
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitOr, ast.BitAnd, ast.Sub)):
        return _is_set(node.left, known) or _is_set(node.right, known)
    return dotted(node) in known
