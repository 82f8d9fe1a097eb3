"""How messages and the README tell to install an extra."""

import ast
import pathlib
import re
import tomllib

ROOT = pathlib.Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
# zsh takes brackets outside quotes for a pattern, and finds no file of that name.
COMMAND = re.compile(r"pip install (\S*grain_sparsecore\[\S*)")


def texts():
    """The README, and every string of the package as it is when the code runs."""
    yield "README.md", (ROOT / "README.md").read_text()
    for path in sorted((ROOT / "grain_sparsecore").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield path.name, ast.unparse(node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path.name, node.value


def test_no_message_leaves_out_the_command():
    pattern = re.compile(r"(?<!pip )install \S*grain_sparsecore\[")
    assert [name for name, text in texts() if pattern.search(text)] == []


def test_extras_are_quoted_and_exist():
    found = [
        (name, command) for name, text in texts() for command in COMMAND.findall(text)
    ]
    wrong = [one for one in found if not re.match(r"'grain_sparsecore\[.*", one[1])]
    assert wrong == []
    named = {
        extra
        for _, command in found
        for extra in re.findall(r"'grain_sparsecore\[([\w-]+)\]'", command)
    }
    assert {"plot", "parquet", "tensorboard", "tpu"} <= named <= set(EXTRAS)
