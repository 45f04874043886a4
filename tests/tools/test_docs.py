"""What README.md and docs/tools.md say of the command line holds: every line parses, every option is described."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from vescale_tools.cli import COMMANDS, build_parser, command_parser
from vescale_tools.common import MEANINGS

ROOT = Path(__file__).parents[2]
TOOLS = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")
COMMON = {"--help", "--json", "--debug", "--storage-option", "--dry-run"}


def lines():
    for page in ("README.md", "docs/tools.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        for line in re.findall(r"^\$ (?:source <\()?(vescale-ckpt [^)\n]*?)(?:\)| > .*| +#.*)?$", text, re.MULTILINE):
            yield pytest.param(line, id=f"{page}: {line}")


@pytest.mark.parametrize("line", list(lines()))
def test_every_line_can_be_typed(line):
    words = shlex.split(line)[1:]
    if words[-1] == "--help":
        assert words[0] in {*COMMANDS, "--help"}
        return
    args = build_parser(words[0]).parse_args(words)
    assert args.command == words[0]


def section(name):
    return re.search(rf"^### {name}\n(.*?)(?=^##|\Z)", TOOLS, re.MULTILINE | re.DOTALL)[1]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_a_section_and_an_example(name):
    assert f"$ vescale-ckpt {name}" in section(name) or f"(vescale-ckpt {name}" in section(name)


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"convert"}))
def test_every_option_is_described(name):
    options = {text for action in command_parser(name)._actions for text in action.option_strings if text[:2] == "--"}
    missing = {option for option in options - COMMON if option not in section(name)}
    assert missing == ({"--overwrite"} if name == "export" else set())


def test_the_exit_codes_are_those_of_the_program():
    table = re.findall(r"^\| (\d+) \| ", TOOLS, re.MULTILINE)
    assert [int(code) for code in table] == [int(code) for code in MEANINGS]


def test_every_command_has_its_help_as_a_picture():
    assert {path.stem for path in (ROOT / "docs" / "images" / "help").glob("*.png")} >= COMMANDS.keys()
