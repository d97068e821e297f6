"""Constructs through which data become code, or text a command: nothing shipped has one.

A gate for what is written next. Each exception has its reason.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.episodes.shared_data import ROOT

FOLDERS = ("m3pc", "replay", "learner", "actors", "planner", "docker", "benchmarks")
# By the name that stands in the code; of methods, whatever object they are called on.
CALLS = {
    **dict.fromkeys(("eval", "exec", "compile", "__import__"), "runs text as code"),
    **dict.fromkeys(("os.system", "os.popen", "subprocess.getoutput"), "gives text to a shell"),
    "subprocess.getstatusoutput": "gives text to a shell",
    "tempfile.mktemp": "names a file that somebody else may make first",
    **dict.fromkeys(("yaml.load", "yaml.load_all"), "may make any object; use strict_yaml"),
    **dict.fromkeys(("yaml.unsafe_load", "yaml.full_load"), "may make any object"),
    **dict.fromkeys(("torch.jit.load", "torch.export.load", "torch.hub.load"), "runs code"),
    **dict.fromkeys(("np.lib.format.read_array", "pd.read_pickle"), "may unpickle"),
    **dict.fromkeys((".extractall", ".unpack_archive"), "writes wherever an archive says"),
    **dict.fromkeys(("gymnasium.register_envs", "runpy.run_path", "runpy.run_module"), "runs code"),
    **dict.fromkeys(
        (".broadcast_object_list", ".all_gather_object", ".gather_object", ".scatter_object_list"),
        "unpickles what a socket gives",
    ),
    **dict.fromkeys((".recv_object_list", ".send_object_list"), "unpickles what a socket gives"),
    **dict.fromkeys(("ssl._create_unverified_context",), "believes everybody"),
}
IMPORTS = {
    *("pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "pty", "telnetlib"),
    *("multiprocessing.managers", "multiprocessing.connection", "xmlrpc", "jsonpickle"),
}
# Calls that need a keyword of a certain value to be safe: the keyword, the value, if it must stand.
KEYWORDS = {
    "torch.load": ("weights_only", True, True),
    "np.load": ("allow_pickle", False, True),
    "numpy.load": ("allow_pickle", False, True),
    "subprocess.run": ("shell", False, False),
    "subprocess.Popen": ("shell", False, False),
    "subprocess.call": ("shell", False, False),
    "subprocess.check_call": ("shell", False, False),
    "subprocess.check_output": ("shell", False, False),
}
MODULE_LOADERS = ("import_module", "importlib.import_module")

EXCEPTIONS = {
    ("m3pc/datasets/sandbox.py", "importlib.import_module"): "its caller's name, never a file's",
    ("benchmarks/live_system.py", "multiprocessing.connection"): "pipes between its own processes",
    ("docker/rehearse.py", "python without -P"): "asks pip for its settings, in this repository",
}


def findings(tree: ast.AST) -> Iterator[tuple[str, int, str]]:
    """What was found, where, and why it is not wanted."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for name in names:
                    yield from _import(name.name, node.lineno)
            case ast.ImportFrom(module=str(module), names=names):
                yield from _import(module, node.lineno)
                for name in names:
                    yield from _import(f"{module}.{name.name}", node.lineno)
            case ast.Call():
                yield from _call(node)
            case ast.List() | ast.Tuple():
                yield from _interpreter(node)


def _import(name: str, line: int) -> Iterator[tuple[str, int, str]]:
    if {name, name.partition(".")[0]} & IMPORTS:
        yield name, line, "data become objects, or code"


def _call(node: ast.Call) -> Iterator[tuple[str, int, str]]:
    name = ast.unparse(node.func)
    method = f".{node.func.attr}" if isinstance(node.func, ast.Attribute) else ""
    for known in (name, method):
        if known in CALLS:
            yield name, node.lineno, CALLS[known]
    given = {word.arg: word.value for word in node.keywords}
    if name in KEYWORDS:
        word, wanted, must_stand = KEYWORDS[name]
        value = given.get(word)
        said = isinstance(value, ast.Constant) and value.value is wanted
        if not said and (must_stand or value is not None or None in given):
            yield name, node.lineno, f"without {word}={wanted}"
    elif isinstance(given.get("shell"), ast.Constant):
        yield name, node.lineno, "speaks of a shell"
    is_constant = bool(node.args) and isinstance(node.args[0], ast.Constant)
    if name in MODULE_LOADERS and not is_constant:
        yield name, node.lineno, "loads a module whose name is not written here"


def _interpreter(node: ast.List | ast.Tuple) -> Iterator[tuple[str, int, str]]:
    """Python looks for modules in the folder that it is started in, unless it is told -P."""
    words = [ast.unparse(word) for word in node.elts]
    if words and words[0] == "sys.executable" and words[1:2] != ["'-P'"]:
        yield "python without -P", node.lineno, "loads modules from wherever its user is"


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def test_nothing_shipped_makes_code_of_data_or_a_command_of_text() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}: {why}"
        for path in sources()
        for what, line, why in findings(ast.parse(path.read_text(encoding="utf-8")))
        if (str(path.relative_to(ROOT)), what) not in EXCEPTIONS
    ]
    assert found == []
    assert len(sources()) > 100


def test_every_exception_is_of_a_file_that_is_there() -> None:
    assert [file for file, _ in EXCEPTIONS if not (ROOT / file).is_file()] == []


BAD = (
    "eval(text)",
    "exec(text)",
    "import pickle",
    "from pickle import loads",
    "import cloudpickle as c",
    "from multiprocessing import managers",
    "torch.load(path)",
    "torch.load(path, weights_only=False)",
    "torch.load(path, **more)",
    "np.load(path)",
    "np.load(path, allow_pickle=True)",
    "yaml.load(text, Loader=yaml.Loader)",
    "yaml.unsafe_load(text)",
    "os.system(line)",
    "subprocess.run(line, shell=True)",
    "subprocess.Popen(line, shell=flag)",
    "run(line, shell=True)",
    "archive.extractall()",
    "dist.broadcast_object_list(found)",
    "importlib.import_module(name)",
    "tempfile.mktemp()",
    "subprocess.run([sys.executable, '-c', code])",
    "[*(sys.executable, '-m', 'x')]",
)
GOOD = (
    "torch.load(path, weights_only=True)",
    "np.load(path, allow_pickle=False)",
    "subprocess.run(['ls'])",
    "model.eval()",
    "re.compile('x')",
    "yaml.safe_load(text)",
    "import_module('m3pc.evaluation.agent')",
    "[sys.executable, '-P', '-m', 'x']",
)


@pytest.mark.parametrize("line", BAD)
def test_the_gate_sees_what_is_bad(line: str) -> None:
    assert list(findings(ast.parse(line)))


@pytest.mark.parametrize("line", GOOD)
def test_the_gate_lets_through_what_is_good(line: str) -> None:
    assert list(findings(ast.parse(line))) == []


def test_no_shell_of_ours_evaluates_what_it_was_given() -> None:
    """Shell scripts that are shipped, and the words that a container starts with."""
    scripts = [*ROOT.glob("docker/*.sh"), ROOT / "docker" / "compose.yaml"]
    assert len(scripts) >= 2
    for path in scripts:
        words = path.read_text(encoding="utf-8").split()
        assert not {"eval", "source", "curl"} & set(words), path
