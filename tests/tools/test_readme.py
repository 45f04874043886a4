"""The README's lines on keeping, collecting, caching, mirroring and clients, run as they stand but for the places."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch

import vescale_ckpt as vc

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
DAY = 86400.0


def section(title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)[1]


def code(title):
    return "\n".join(re.findall(r"```python\n(.*?)```", section(title), re.DOTALL))


def commands(title):
    return re.findall(r"^\$ vescale-ckpt (.*)$", section(title), re.MULTILINE)


def save(store, steps, **options):
    with vc.Checkpointer(store, "llama-7b", **options) as checkpointer:
        for step in steps:
            checkpointer.save(step, {"w": torch.full((1000,), step), "same": torch.arange(1000)})


def steps(store):
    return [info.step for info in store.snapshots("llama-7b")]


def test_keep_and_collect(command, tmp_path):
    with vc.open_store(tmp_path / "s") as store:
        save(store, [1000, 1500, 2000, 2500])
        names = {"vc": vc, "store": store}
        exec(code("Keep and collect"), names)  # noqa: S102 - our own README
        with names["ckpt"] as checkpointer:
            for step in (2600, 2700, 2800):
                checkpointer.save(step, {"w": torch.full((1000,), step), "same": torch.arange(1000)})
        assert steps(store) == [1000, 2000, 2600, 2700, 2800]
        for line in commands("Keep and collect"):
            words = line.replace("s3://bucket/checkpoints", str(tmp_path / "s")).split()
            assert command(*words).code == 0
        packs = len(list((tmp_path / "s" / "packs").glob("*/*")))
        assert packs == 7
        for days in (2, 4):
            store.gc(now=time.time() + days * DAY)
        assert len(list((tmp_path / "s" / "packs").glob("*/*"))) == 5, "what only 1500 and 2500 had is gone"


def test_cache_and_mirror(command, tmp_path):
    places = {
        "s3://bucket/checkpoints": str(tmp_path / "s"),
        "s3://backup/checkpoints": str(tmp_path / "copy"),
        "/nvme/cache": str(tmp_path / "cache"),
    }
    with vc.open_store(tmp_path / "s") as store:
        save(store, [1000])
    text, line = code("Cache and mirror"), commands("Cache and mirror")[0]
    for place, here in places.items():
        text, line = text.replace(place, here), line.replace(place, here)
    assert command(*line.split()).code == 0
    names = {"vc": vc}
    exec(text, names)  # noqa: S102 - our own README
    with names["store"] as store:
        assert torch.equal(store["llama-7b@1000"].read("w"), torch.full((1000,), 1000))
        before = store.counts
        store["llama-7b@1000"].read("w")
        assert (store.counts - before).down_bytes < 1000, "the second time asks for a ref and no data"
        pack = next((tmp_path / "s" / "packs").glob("*/*"))
        pack.chmod(0o644)
        pack.write_bytes(b"gone")
        assert len(store.heal("llama-7b@1000").healed) == 1
    assert command("verify", tmp_path / "s").code == 0


@pytest.mark.s3
def test_s3_with_less_cpu(command, s3_url):
    text = code("S3 with less CPU").replace("s3://bucket/checkpoints", s3_url.url)
    text = text.replace('{"client": "obstore"}', '{"client": "obstore", **options}')
    names = {"vc": vc, "options": s3_url.storage_options}
    exec(text, names)  # noqa: S102 - our own README
    with names["store"] as store:
        save(store, [1])
    options = [f"--storage-option={name}={value}" for name, value in s3_url.storage_options.items()]
    result = command("verify", s3_url.url, *options, "--storage-option", "client=obstore")
    assert (result.code, result.err) == (0, "")
