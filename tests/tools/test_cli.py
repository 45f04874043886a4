from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from vescale_ckpt.errors import AccessDeniedError
from vescale_tools import cli, cmd_ls
from vescale_tools.common import MEANINGS


@pytest.mark.parametrize("name", [None, *cli.COMMANDS])
def test_every_help_ends_with_the_exit_codes(command, name):
    result = command(*([] if name is None else [name]), "--help")
    assert (result.code, result.err) == (0, "")
    tail = result.out[result.out.index("exit codes:") :].splitlines()[1:]
    assert [line.split()[0] for line in tail] == [str(int(code)) for code in MEANINGS]


def test_every_command_has_the_common_options(command):
    for name in cli.COMMANDS:
        out = command(name, "--help").out
        assert all(option in out for option in ("--json", "--debug", "--storage-option"))


def test_what_changes_something_can_be_tried_first(command):
    for name in ("export", "tag", "rm", "prune", "gc", "repack", "mirror", "fsck", "report", "doctor"):
        assert "--dry-run" in command(name, "--help").out


def test_version(command):
    result = command("--version")
    assert result.code == 0
    assert re.fullmatch(r"vescale-ckpt \d+\.\d+\.\d+\n", result.out)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["frobnicate"],
        ["ls"],
        ["ls", "--frob", "x"],
        ["ls", "--js", "x"],
        ["show", "url"],
        ["export", "url", "run@1", "dir", "--max-shard-size", "5 apples"],
        ["export", "url", "run@1", "dir", "--dtype", "int8"],
    ],
)
def test_usage_errors_are_one_line_and_point_to_the_help(command, arguments):
    result = command(*arguments)
    assert result.code == 2
    assert result.out == ""
    assert re.fullmatch(r"vescale-ckpt: error: .*; see vescale-ckpt( \w+)? --help\n", result.err)
    as_json = command(*arguments, "--json")
    assert as_json.code == 2
    assert as_json.json["error"]["kind"] == "usage"


def test_a_command_may_come_after_its_options(command, tmp_path):
    assert command("ls", "--json", tmp_path / "none").code == 10


@pytest.mark.parametrize("name", ["ls", "show", "verify", "export"])
def test_a_place_without_a_store(command, tmp_path, name):
    rest = {"show": ["run@1"], "export": ["run@1", tmp_path / "out"]}.get(name, [])
    result = command(name, tmp_path / "none", *rest)
    assert (result.code, result.out) == (10, "")
    assert str(tmp_path / "none") in result.err
    assert not (tmp_path / "none").exists()
    assert not (tmp_path / "out").exists()


def test_something_else_than_a_store(command, tmp_path):
    (tmp_path / "store.json").write_text('{"what": "else"}')
    result = command("ls", tmp_path)
    assert result.code in {2, 3}
    assert result.err.count("\n") == 1


def test_an_url_that_nobody_serves(command):
    assert command("ls", "nope://bucket/x").code == 2
    assert command("ls", "").code == 2


def test_options_that_the_back_end_does_not_know(command, tmp_path):
    result = command("ls", tmp_path, "--storage-option", "frob=secretvalue")
    assert result.code == 2
    assert "frob" in result.err
    assert "secretvalue" not in result.err


def test_options_reach_the_back_end(command, url, monkeypatch):
    monkeypatch.setenv("VESCALE_STORAGE_OPTIONS", '{"num_threads": 0}')
    assert command("ls", url).code != 0
    assert command("ls", url, "--storage-option", "num_threads=2").code == 0


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (AccessDeniedError("no credentials for s3://b"), 13, "access_denied"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("odd"), 1, "internal"),
    ],
)
def test_whatever_is_raised_ends_as_documented(command, url, monkeypatch, error, code, kind):
    def fail(_args):
        raise error

    monkeypatch.setattr(cmd_ls, "run", fail)
    result = command("ls", url, "--json")
    assert result.code == code
    assert result.json["error"]["kind"] == kind
    assert result.err.count("\n") == 1
    assert "Traceback" in command("ls", url, "--debug").err


def test_as_a_process(url):
    done = subprocess.run(
        [sys.executable, "-m", "vescale_tools.cli", "ls", str(url), "gpt [0]*", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [snapshot["step"] for snapshot in json.loads(done.stdout)["snapshots"]] == [10, 20]


# A command that needs no torch, so that a process of its own is quick.
PROGRAM = """
import sys, time, types
from vescale_tools import cli
fake = types.ModuleType("vescale_tools.cmd_ls")
fake.add_arguments = lambda parser: parser.add_argument("what")
def run(args):
    print("ready", flush=args.what == "wait")
    time.sleep(60 if args.what == "wait" else 0)
    return 0
fake.run = run
sys.modules[fake.__name__] = fake
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("arguments", "code"), [(["ls", "print"], 1), (["ls", "--help"], 0), (["--version"], 0)])
def test_a_reader_that_leaves_is_no_crash(arguments, code):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (code, "")


HEARS_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
"""A shell's background jobs are started deaf to it, and this test may be part of one."""


def test_ctrl_c_ends_with_130():
    process = subprocess.Popen(
        [sys.executable, "-c", HEARS_CTRL_C + PROGRAM, "ls", "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "vescale-ckpt: error: interrupted\n")


def test_help_needs_no_torch():
    program = "import sys; from vescale_tools import cli; cli.main(['--help']); sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL, timeout=60, check=False).returncode
        == 0
    )
