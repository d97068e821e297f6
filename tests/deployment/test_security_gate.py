"""Code through which data become code: what ruff's S rules and import-linter do not see.

ruff forbids eval, exec, shells, unsafe YAML loaders, mktemp, tarfile.extractall and unverified TLS;
import-linter forbids pickle and its relatives in the packages. Each exception here has its reason.
"""

import ast
from collections.abc import Iterator

import pytest

from tests.support.episodes.shared_data import ROOT

FOLDERS = ("m3pc", "replay", "learner", "actors", "planner", "docker", "benchmarks")
# Names as they are written; those that begin with a dot are methods of any object.
CALLS = {
    **dict.fromkeys(("compile", "__import__"), "runs text as code"),
    **dict.fromkeys(("yaml.unsafe_load", "yaml.full_load", "yaml.load_all"), "makes any object"),
    **dict.fromkeys(("torch.jit.load", "torch.export.load", "torch.hub.load"), "runs code"),
    **dict.fromkeys(("gymnasium.register_envs", "runpy.run_path", "runpy.run_module"), "runs code"),
    "np.lib.format.read_array": "may unpickle",
    **dict.fromkeys((".extractall", ".unpack_archive"), "writes where an archive says"),
    **dict.fromkeys(
        (
            *(".broadcast_object_list", ".all_gather_object", ".gather_object"),
            *(".scatter_object_list", ".recv_object_list", ".send_object_list"),
        ),
        "unpickles what a socket receives",
    ),
}
IMPORTS = {  # ruff sees no use of them, and import-linter neither benchmarks nor docker
    *("cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "pickle", "shelve"),
    *("pty", "telnetlib", "xmlrpc", "multiprocessing.managers", "multiprocessing.connection"),
}
# Calls that are safe only with this keyword and value.
KEYWORDS = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
}
MODULE_LOADERS = ("import_module", "importlib.import_module")

EXCEPTIONS = {
    ("m3pc/datasets/sandbox.py", "importlib.import_module"): "the caller's name, never a file's",
    ("replay/__init__.py", "import_module"): "a name from the table in that file",
    ("benchmarks/live_system.py", "multiprocessing.connection"): "pipes between its own processes",
    ("docker/rehearse.py", "python without -P"): "asks pip for its settings, in this repository",
}


def findings(tree: ast.AST) -> Iterator[tuple[str, int, str]]:
    """The construct, its line, and why it is forbidden."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                names = [alias.name for alias in aliases]
            case ast.ImportFrom(module=str(module), names=aliases):
                names = [module, *(f"{module}.{alias.name}" for alias in aliases)]
            case ast.Call():
                yield from _call(node)
                continue
            case ast.List() | ast.Tuple():
                yield from _interpreter(node)
                continue
            case _:
                continue
        for name in names:
            if {name, name.partition(".")[0]} & IMPORTS:
                yield name, node.lineno, "makes objects or code of data"


def _call(node: ast.Call) -> Iterator[tuple[str, int, str]]:
    name = ast.unparse(node.func)
    method = f".{node.func.attr}" if isinstance(node.func, ast.Attribute) else ""
    for known in (name, method):
        if known in CALLS:
            yield name, node.lineno, CALLS[known]
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if name in KEYWORDS:
        keyword, safe = KEYWORDS[name]
        value = keywords.get(keyword)
        if not (isinstance(value, ast.Constant) and value.value is safe):
            yield name, node.lineno, f"without {keyword}={safe}"
    if ast.unparse(keywords.get("shell", ast.Constant(False))) != "False":
        yield name, node.lineno, "may use a shell"
    if name.startswith("subprocess.") and None in keywords:
        yield name, node.lineno, "may use a shell"
    if name in MODULE_LOADERS and not (node.args and isinstance(node.args[0], ast.Constant)):
        yield name, node.lineno, "loads a module whose name is not written here"


def _interpreter(node: ast.List | ast.Tuple) -> Iterator[tuple[str, int, str]]:
    """Without -P, Python looks for modules in the folder that it is started in."""
    words = [ast.unparse(word) for word in node.elts]
    if words and words[0] == "sys.executable" and words[1:2] != ["'-P'"]:
        yield "python without -P", node.lineno, "loads modules from the current folder"


def test_nothing_shipped_makes_code_of_data_or_a_command_of_text() -> None:
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    forbidden = {
        (str(path.relative_to(ROOT)), construct): f"line {line}: {reason}"
        for path in paths
        for construct, line, reason in findings(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert {key: why for key, why in forbidden.items() if key not in EXCEPTIONS} == {}
    assert forbidden.keys() >= EXCEPTIONS.keys(), "an exception is not needed any more"
    assert len(paths) > 100


BAD = (
    "compile(text, '', 'exec')",
    "import pickle",
    "from pickle import loads",
    "import cloudpickle as c",
    "from multiprocessing import managers",
    "torch.load(path)",
    "torch.load(path, weights_only=False)",
    "torch.load(path, **more)",
    "np.load(path)",
    "np.load(path, allow_pickle=True)",
    "yaml.unsafe_load(text)",
    "subprocess.Popen(line, shell=flag)",
    "subprocess.run(line, **more)",
    "run(line, shell=True)",
    "archive.extractall()",
    "dist.broadcast_object_list(objects)",
    "importlib.import_module(name)",
    "subprocess.run([sys.executable, '-c', code])",
    "[*(sys.executable, '-m', 'x')]",
)
GOOD = (
    "torch.load(path, weights_only=True)",
    "np.load(path, allow_pickle=False)",
    "subprocess.run(['ls'], shell=False)",
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


def test_no_shipped_shell_script_evaluates_its_input() -> None:
    """Shell scripts, and the commands that a container starts with."""
    scripts = [*ROOT.glob("docker/*.sh"), ROOT / "docker" / "compose.yaml"]
    assert len(scripts) >= 2
    for path in scripts:
        words = path.read_text(encoding="utf-8").split()
        assert not {"eval", "source", "curl"} & set(words), path
