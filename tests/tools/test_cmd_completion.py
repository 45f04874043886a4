from __future__ import annotations

import shutil
import subprocess

import pytest

from vescale_tools.cli import COMMANDS, command_parser
from vescale_tools.completion import SHELLS, bash, words_of


@pytest.mark.parametrize("shell", sorted(SHELLS))
def test_every_command_and_option_is_offered(command, shell):
    result = command("completion", shell)
    assert (result.code, result.err) == (0, "")
    for name in COMMANDS:
        assert name in result.out
    for option in ("keep-last", "dry-run", "storage-option", "grace"):
        assert option in result.out
    assert command("completion", shell, "--json").json == {"shell": shell, "script": result.out}


def complete(script, *words):
    """Return what bash offers after these words."""
    line = " ".join(f'"{word}"' for word in words)
    program = (
        f'{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _vescale_ckpt; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


def test_bash_offers_what_fits(command, tmp_path, monkeypatch):
    script = command("completion", "bash").out
    assert complete(script, "vescale-ckpt", "rep") == ["report", "repack"]
    assert set(complete(script, "vescale-ckpt", "")) >= set(COMMANDS)
    assert complete(script, "vescale-ckpt", "prune", "url", "--keep-l") == ["--keep-last"]
    assert complete(script, "vescale-ckpt", "export", "--dtype", "fp3") == ["fp32"]
    assert complete(script, "vescale-ckpt", "completion", "f") == ["fish"]
    (tmp_path / "store-here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert complete(script, "vescale-ckpt", "ls", "sto") == ["store-here"]


def test_the_scripts_are_free_of_what_a_shell_would_run():
    words = words_of("x", "it's $(odd)", command_parser("ls"))
    assert "$(odd)" not in bash([words])
    assert "'\\''" in SHELLS["zsh"]([words])
    assert "\\'" in SHELLS["fish"]([words])


@pytest.mark.parametrize("shell", [shell for shell in ("bash", "zsh", "fish") if shutil.which(shell)])
def test_the_script_parses(command, shell):
    script = command("completion", shell).out
    subprocess.run([shell, "-n"], input=script, text=True, timeout=60, check=True)


def test_an_unknown_shell(command):
    assert command("completion", "csh").code == 2
    assert command("completion").code == 2
