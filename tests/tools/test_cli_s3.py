from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import vescale_ckpt as vc

pytestmark = pytest.mark.s3


@pytest.fixture
def saved(s3_url):
    state = {"model": {"w": torch.arange(1000.0)}}
    with (
        vc.open_store(s3_url.url, storage_options=s3_url.storage_options) as store,
        vc.Checkpointer(store, "run") as checkpointer,
    ):
        checkpointer.save(1, state)
    return s3_url


def options(place, **changes):
    return [f"--storage-option={name}={value}" for name, value in (place.storage_options | changes).items()]


def test_a_store_on_s3_from_the_command_line_alone(command, saved, tmp_path):
    assert command("ls", saved.url, "run", *options(saved), "--json").json["snapshots"][0]["bytes"] == 4000
    assert command("show", saved.url, "run@1", *options(saved)).code == 0
    assert command("verify", saved.url, *options(saved)).code == 0
    assert command("export", saved.url, "run@1", tmp_path / "out", *options(saved)).code == 0
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], torch.arange(1000.0))
    assert command("tag", saved.url, "run@1", "best", *options(saved)).code == 0
    assert command("rm", saved.url, "run@1", *options(saved)).code == 11
    assert command("tag", saved.url, "run@best", "--delete", *options(saved)).code == 0
    assert command("rm", saved.url, "run@1", *options(saved)).code == 0
    assert command("show", saved.url, "run@1", *options(saved)).code == 10


def test_credentials_from_the_environment(command, saved, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", saved.storage_options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", saved.storage_options["secret"])
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", saved.storage_options["endpoint_url"])
    assert command("ls", saved.url).code == 0
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    endpoint = f"--storage-option=client_kwargs.endpoint_url={saved.storage_options['endpoint_url']}"
    assert command("ls", saved.url, endpoint).code == 0


def test_comparing_measuring_and_thinning_out_on_s3(command, saved, tmp_path):
    with (
        vc.open_store(saved.url, storage_options=saved.storage_options) as store,
        vc.Checkpointer(store, "run") as checkpointer,
    ):
        checkpointer.save(2, {"model": {"w": torch.arange(1000.0) + 1}})
    common = (*options(saved), "--json")
    found = command("diff", saved.url, "run@1", "run@2", *common).json
    assert found["tensors"][0]["compared"]["max_abs"] == 1.0
    assert command("du", saved.url, *common).json["stored_bytes"] == 8000
    assert command("cat", saved.url, "run@2", "model.w[:3]", *common).json["values"] == [1.0, 2.0, 3.0]
    assert command("report", saved.url, "run", "-o", tmp_path / "p.html", *common).json["snapshots"] == 2
    assert command("prune", saved.url, "run", "--keep-last", "1", *common).json["runs"][0]["deleted"] == [1]
    assert command("gc", saved.url, "--grace", "0", *common).json["done"]["deleted"]["packs"]["objects"] == 1
    assert command("verify", saved.url, "--deep", *common).json["ok"] is True
    assert command("fsck", saved.url, *common).json["findings"] == []
