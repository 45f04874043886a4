from __future__ import annotations

import pytest


def files(url):
    return {path.relative_to(url): path.stat().st_mtime_ns for path in url.rglob("*") if path.is_file()}


def test_a_store_that_is_well(command, url):
    before = files(url)
    result = command("doctor", url)
    assert (result.code, result.err) == (0, "")
    assert {line.split()[0] for line in result.lines if line[:4].strip() in {"ok", "note", "bad"}} == {"ok"}
    assert "create-only put, 8 at once" in result.out
    assert "get large" in result.out
    assert files(url) == before


def test_as_json(command, url):
    result = command("doctor", url, "--json").json
    assert result["ok"] is True
    assert result["capabilities"]["conditional_put"] is True
    assert {"name", "level", "detail"} == set(result["checks"][0])
    assert {latency["verb"] for latency in result["latencies"]} >= {"put", "get", "list"}


def test_a_dry_run_tries_nothing(command, url):
    result = command("doctor", url, "--dry-run", "--json").json
    assert result["latencies"] == []
    assert not any(check["name"].startswith("create-only") for check in result["checks"])


def test_damage(command, url, damage):
    damage(url / "refs" / "other" / "000000000000.000001", 100)
    result = command("doctor", url, "--dry-run")
    assert result.code == 1
    assert "see fsck" in result.out


def test_no_store(command, tmp_path):
    assert command("doctor", tmp_path / "none").code == 10
    assert command("doctor").code == 2


@pytest.mark.s3
def test_on_s3(command, url, s3_url):
    options = [f"{name}={value}" for name, value in s3_url.storage_options.items()]
    assert command("mirror", url, s3_url.url, *[f"--to-option={option}" for option in options]).code == 0
    result = command("doctor", s3_url.url, *[f"--storage-option={option}" for option in options], "--json")
    assert result.code == 0
    assert {check["level"] for check in result.json["checks"]} == {"ok"}
