"""Shell completion, generated from the argument parser: words, so that what is offered is what is understood."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

PROGRAM: Final = "vescale-ckpt"


@dataclass(frozen=True, slots=True)
class Flag:
    """An option of a command."""

    names: tuple[str, ...]
    takes_value: bool
    choices: tuple[str, ...]
    help: str
    """One line."""


@dataclass(frozen=True, slots=True)
class Words:
    """What may follow one command."""

    command: str
    summary: str
    flags: tuple[Flag, ...]
    choices: tuple[str, ...]
    """Of its positional arguments; where there are none, files are offered."""


def words_of(command: str, summary: str, parser: argparse.ArgumentParser) -> Words:
    """Return what a command's parser understands."""
    flags: list[Flag] = []
    choices: list[str] = []
    for action in parser._actions:  # noqa: SLF001 - argparse has no public way to ask for them
        found = tuple(str(choice) for choice in action.choices or ())
        if action.option_strings:
            flags.append(Flag(tuple(action.option_strings), action.nargs != 0, found, _one_line(action.help)))
        else:
            choices += found
    return Words(command, summary, tuple(flags), tuple(choices))


def _one_line(text: Any) -> str:
    first = str(text or "").partition(";")[0]
    return " ".join(first.split()).replace("%%", "%")


def bash(commands: Sequence[Words]) -> str:
    """Return a script for bash; to be sourced."""
    cases = []
    for words in commands:
        offered = " ".join([*(name for flag in words.flags for name in flag.names), *words.choices])
        cases.append(f'    {words.command}) words="{offered}" ;;')
    values = [
        f'    {words.command}:{name}) COMPREPLY=($(compgen -W "{" ".join(flag.choices)}" -- "$cur")); return ;;'
        for words in commands
        for flag in words.flags
        for name in flag.names
        if flag.choices
    ]
    names = " ".join(words.command for words in commands)
    return "\n".join(
        [
            f"# bash completion of {PROGRAM}",
            "_vescale_ckpt() {",
            '  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" command="" word words=""',
            '  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do',
            '    case "$word" in -*) ;; *) command="$word"; break ;; esac',
            "  done",
            '  if [ -z "$command" ]; then',
            f'    COMPREPLY=($(compgen -W "{names} --help --version" -- "$cur")); return',
            "  fi",
            '  case "$command:$prev" in',
            *values,
            "    *) ;;",
            "  esac",
            '  case "$command" in',
            *cases,
            "  esac",
            '  if [[ "$cur" == -* || "$command" == completion ]]; then',
            '    COMPREPLY=($(compgen -W "$words" -- "$cur"))',
            "  else",
            '    COMPREPLY=($(compgen -f -- "$cur"))',
            "  fi",
            "}",
            f"complete -o filenames -F _vescale_ckpt {PROGRAM}",
            "",
        ]
    )


def zsh(commands: Sequence[Words]) -> str:
    """Return a script for zsh: a file ``_vescale-ckpt`` in ``$fpath``, or to be sourced after ``compinit``."""
    lines = [f"#compdef {PROGRAM}", "_vescale_ckpt() {", "  local -a commands", "  commands=("]
    lines += [f"    {_quoted(f'{words.command}:{words.summary}')}" for words in commands]
    lines += [
        "  )",
        "  if (( CURRENT == 2 )); then",
        "    _describe -t commands command commands; return",
        "  fi",
        '  case "$words[2]" in',
    ]
    for words in commands:
        specs = [_zsh_flag(flag, name) for flag in words.flags for name in flag.names]
        rest = f"'*:word:({' '.join(words.choices)})'" if words.choices else "'*:file:_files'"
        lines.append(f"    {words.command}) shift words; (( CURRENT-- )); _arguments {' '.join(specs)} {rest} ;;")
    lines += ["  esac", "}", f"compdef _vescale_ckpt {PROGRAM}", ""]
    return "\n".join(lines)


def _zsh_flag(flag: Flag, name: str) -> str:
    about = flag.help.replace("\\", "").replace("[", "(").replace("]", ")").replace(":", "\\:")
    value = f":value:({' '.join(flag.choices)})" if flag.choices else ":value:_files" if flag.takes_value else ""
    return _quoted(f"{name}[{about}]{value}")


def fish(commands: Sequence[Words]) -> str:
    """Return a script for fish: a file ``vescale-ckpt.fish`` in its folder of completions."""
    lines = [f"# fish completion of {PROGRAM}"]
    for words in commands:
        lines.append(
            f"complete -c {PROGRAM} -n __fish_use_subcommand -f -a {words.command} -d {_fish_quoted(words.summary)}"
        )
        for flag in words.flags:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names)
            values = (
                f" -x -a {_fish_quoted(' '.join(flag.choices))}" if flag.choices else " -r" if flag.takes_value else ""
            )
            about = _fish_quoted(flag.help)
            lines.append(
                f"complete -c {PROGRAM} -n '__fish_seen_subcommand_from {words.command}' {names}{values} -d {about}"
            )
        if words.choices:
            offered = _fish_quoted(" ".join(words.choices))
            lines.append(f"complete -c {PROGRAM} -n '__fish_seen_subcommand_from {words.command}' -f -a {offered}")
    return "\n".join([*lines, ""])


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: Final[dict[str, Callable[[Sequence[Words]], str]]] = {"bash": bash, "zsh": zsh, "fish": fish}
"""Shell -> what makes its script."""
