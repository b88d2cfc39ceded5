"""A completion script for fish, made from the parser.

fish evaluates the condition of a completion, and expands the words that it offers. So every text is quoted: for the
script, and for the evaluation too where there is one.
"""

import argparse
import re
from collections.abc import Iterable, Iterator

from headgate.errors import printable

FILES = ("FILE", "LOG")
"""The name of an argument's value if it is a file."""

_FUNCTIONS = """\
function __headgate_command --description 'The command before the cursor, such as: override set'
    set -l command
    set -l skip 0
    for word in (commandline -opc)[2..-1]
        if test $skip = 1
            set skip 0
        else if contains -- $word $__headgate_valued
            set skip 1
        else if not string match -q -- '-*' $word
            contains -- (string join ' ' $command $word) $__headgate_commands; or break
            set -a command $word
        end
    end
    string join ' ' $command
end

function __headgate_at --description 'Whether the command before the cursor is this one'
    set -l command (__headgate_command)
    test "$command" = "$argv"
end
"""


def fish_script(root: argparse.ArgumentParser) -> str:
    """A script that completes commands, options, files and choices."""
    parsers = dict(_parsers(root, ()))
    actions = [action for parser in parsers.values() for action in parser._actions]
    valued = sorted({name for one in actions if one.option_strings and one.nargs != 0 for name in one.option_strings})
    return "\n".join(
        [
            f"# Completion of {root.prog} for fish.",
            f"set -g __headgate_commands {' '.join([_quoted(' '.join(path)) for path in parsers if path])}",
            f"set -g __headgate_valued {' '.join(map(_quoted, valued))}",
            "",
            _FUNCTIONS,
            f"complete -c {_quoted(root.prog)} -f",
            *[line for path, parser in parsers.items() for line in _completions(root.prog, path, parser)],
            "",
        ]
    )


def _parsers(
    parser: argparse.ArgumentParser, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Every command with its parser, that of all commands first."""
    yield path, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from _parsers(below, (*path, name))


def _completions(prog: str, path: tuple[str, ...], parser: argparse.ArgumentParser) -> Iterator[str]:
    """A line for each thing that may follow a command."""
    condition = f"__headgate_at {_quoted(' '.join(path))}"
    start = f"complete -c {_quoted(prog)} -n {_quoted(condition)}"
    for action in parser._actions:
        about = _about(parser, action)
        if isinstance(action, argparse._SubParsersAction):
            for one in action._choices_actions:
                yield f"{start} -a {_offered([one.dest])} -d {_quoted(one.help or '')}"
        elif action.help is argparse.SUPPRESS:
            continue
        elif action.option_strings:
            names = [_option(name) for name in action.option_strings]
            yield f"{start} {' '.join(names)}{_value(action)} -d {_quoted(about)}"
        elif action.choices is not None:
            yield f"{start} -a {_offered(map(str, action.choices))} -d {_quoted(about)}"
        elif action.metavar in FILES:
            yield f"{start} -F"


def _option(name: str) -> str:
    return f"-l {_quoted(name[2:])}" if name.startswith("--") else f"-s {_quoted(name[1:])}"


def _value(action: argparse.Action) -> str:
    """The values that an option takes: none, one of some words, a file, or any word."""
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        return f" -x -a {_offered(map(str, action.choices))}"
    if action.nargs == "?":
        return ""
    return " -r -F" if action.metavar in FILES else " -x"


def _about(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """The help of an argument in one line."""
    return parser._get_formatter()._expand_help(action) if action.help and action.help is not argparse.SUPPRESS else ""


def _offered(words: Iterable[str]) -> str:
    """Words that are offered: fish expands them once more."""
    return _quoted(" ".join([re.sub(r"([^\w./:=-])", r"\\\1", word) for word in words]))


def _quoted(text: str) -> str:
    """A text in single quotes, in one line: within them, only a quote and a backslash mean something to fish."""
    escaped = printable(" ".join(text.split())).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
