"""What an installed wheel must do. wheel-test.sh runs this file in a clean environment, away from the checkout."""

import importlib
import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vescale_ckpt as vc

PACKAGES = ("vescale_ckpt", "vescale_train", "vescale_storage", "vescale_tools")


@pytest.fixture
def command():
    """Return a function that runs the installed ``vescale-ckpt``."""
    script = shutil.which("vescale-ckpt", path=Path(sys.executable).parent)
    assert script is not None

    def run(*arguments):
        return subprocess.run([script, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False)

    return run


@pytest.mark.parametrize("name", PACKAGES)
def test_packages_are_typed_and_come_from_the_wheel(name):
    package = importlib.import_module(name)
    folder = Path(package.__file__).parent
    assert (folder / "py.typed").exists()
    assert folder.is_relative_to(sys.prefix)


def test_the_wheel_holds_the_packages_and_nothing_else():
    files = importlib.metadata.files("vescale-ckpt")
    tops = {file.parts[0] for file in files if file.suffix != ".pyc"}
    version = importlib.metadata.version("vescale-ckpt")
    assert tops == {*PACKAGES, f"vescale_ckpt-{version}.dist-info", ".."}  # ".." leads to the command
    assert any(file.name == "LICENSE" for file in files)


def test_a_state_comes_back(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    vc.save(tmp_path, {"model": model, "optimizer": optimizer, "epoch": 7})

    other = torch.nn.Linear(3, 2)
    state = {"model": other, "optimizer": torch.optim.AdamW(other.parameters()), "epoch": 0}
    vc.load(tmp_path, state)
    assert state["epoch"] == 7
    assert torch.equal(other.weight, model.weight)
    moments = [s["exp_avg"] for o in (optimizer, state["optimizer"]) for s in o.state.values()]
    assert torch.equal(moments[0], moments[2])


def test_the_command_lists_verifies_and_exports(command, tmp_path):
    store = tmp_path / "store"
    weights = {"w": torch.arange(6.0).reshape(2, 3)}
    vc.Checkpointer(vc.open_store(store), "run").save(10, {"model": weights})
    listed = command("ls", store)
    assert listed.returncode == 0, listed.stderr
    assert "run" in listed.stdout
    assert command("verify", store).returncode == 0
    exported = command("export", store, "run@10", tmp_path / "export")
    assert exported.returncode == 0, exported.stderr
    assert list((tmp_path / "export").glob("*.safetensors"))


def test_the_command_says_what_is_not_there(command, tmp_path):
    missing = command("show", tmp_path, "run@10")
    assert missing.returncode == 10
    assert str(tmp_path) in missing.stderr
    assert "Traceback" not in missing.stderr


def test_the_command_finds_a_flipped_byte(command, tmp_path):
    vc.Checkpointer(vc.open_store(tmp_path), "run").save(1, {"w": torch.ones(1000)})
    pack = next(path for path in (tmp_path / "packs").rglob("*") if path.is_file())
    content = bytearray(pack.read_bytes())
    content[100] ^= 1
    pack.chmod(0o644)
    pack.write_bytes(content)
    assert command("verify", tmp_path).returncode == 3
