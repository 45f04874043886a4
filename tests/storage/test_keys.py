from __future__ import annotations

import pytest

from vescale_storage import keys
from vescale_storage.errors import ConfigError, FormatError

HEX64 = "0123456789abcdef" * 4
HEX32 = "0123456789abcdef" * 2


def test_layout_is_what_the_format_says():
    assert keys.STORE_KEY == "store.json"
    assert keys.pack_key(HEX64) == f"packs/01/{HEX64}"
    assert keys.manifest_key(HEX64) == f"manifests/01/{HEX64}"
    assert keys.ref_key("llama-7b", 1000, 1) == "refs/llama-7b/000000001000.000001"
    assert keys.tag_key("llama-7b", "best") == "refs/llama-7b/tags/best"
    assert keys.fragment_key(HEX32, 0) == f"txn/{HEX32}/rank-0"
    assert keys.abort_key(HEX32, 4095) == f"txn/{HEX32}/abort-4095"
    assert keys.ref_key("r", 5, 2).startswith(keys.step_prefix("r", 5))
    assert keys.ref_key("r", 5, 2).startswith(keys.run_prefix("r"))
    assert keys.tag_key("r", "t").startswith(keys.tags_prefix("r"))
    assert keys.abort_key(HEX32, 1).startswith(keys.abort_prefix(HEX32))
    assert keys.fragment_key(HEX32, 1).startswith(keys.transaction_prefix(HEX32))


def test_one_step_is_no_prefix_of_another():
    assert not keys.ref_key("r", 10, 1).startswith(keys.step_prefix("r", 1))
    assert not keys.ref_key("r2", 1, 1).startswith(keys.run_prefix("r"))


@pytest.mark.parametrize(
    ("name", "encoded"),
    [
        ("llama-7b_v2.1", "llama-7b_v2.1"),
        ("my run [v1] *?#%", "my%20run%20%5Bv1%5D%20%2A%3F%23%25"),
        ("模型", "%E6%A8%A1%E5%9E%8B"),
        ("a\\b:c", "a%5Cb%3Ac"),
        ("🚀", "%F0%9F%9A%80"),
    ],
)
def test_names_are_encoded_reversibly(name, encoded):
    assert keys.encode_name(name) == encoded
    assert keys.decode_name(encoded) == name
    assert keys.parse_ref_key(keys.ref_key(name, 3, 4)) == (name, 3, 4)
    assert keys.parse_tag_key(keys.tag_key(name, name)) == (name, name)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "/", "a/b", "/a", "a/", "run@1", "a\nb", "a\x00", "a\x7f", "\x85", "\ud800", "a\u2028b"],
)
def test_names_that_cannot_be_keys_are_refused(name):
    with pytest.raises(ConfigError):
        keys.validate_run(name)
    with pytest.raises(ConfigError):
        keys.validate_tag(name)


@pytest.mark.parametrize("name", ["x" * 201, "é" * 34, None, 5, b"run"])
def test_names_that_are_too_long_or_no_text_are_refused(name):
    with pytest.raises(ConfigError):
        keys.validate_run(name)
    with pytest.raises(ConfigError):
        keys.validate_tag(name)


def test_bounds_of_names():
    assert keys.validate_run("x" * 200)
    assert keys.validate_run("é" * 33)  # 198 bytes as a key
    assert keys.validate_run("12")
    with pytest.raises(ConfigError, match="digits only"):
        keys.validate_tag("0012")
    assert keys.validate_tag("v12")
    with pytest.raises(ConfigError):
        keys.encode_name("\udcff")


@pytest.mark.parametrize("encoded", ["", "a b", "%", "%4", "%41", "%e6%a8%a1", "%FF", "%ED%A0%80", "a/b", "%2g", "a\n"])
def test_only_what_encode_makes_is_decoded(encoded):
    with pytest.raises(FormatError):
        keys.decode_name(encoded)


@pytest.mark.parametrize("step", [-1, 10**12, 1.0, True, "1", None])
def test_steps_out_of_range_are_refused(step):
    with pytest.raises(ConfigError):
        keys.ref_key("r", step, 1)


def test_integers_of_other_libraries_are_integers():
    class Int64:
        def __index__(self) -> int:
            return 7

    assert keys.ref_key("r", Int64(), 1) == keys.ref_key("r", 7, 1)


@pytest.mark.parametrize("version", [0, -1, 10**6])
def test_versions_out_of_range_are_refused(version):
    with pytest.raises(ConfigError):
        keys.ref_key("r", 1, version)


@pytest.mark.parametrize("name", ["", HEX64.upper(), HEX64[1:], HEX64 + "0", "../" + HEX64[3:], HEX64 + "\n"])
def test_blob_names_are_hex(name):
    for make in (keys.pack_key, keys.manifest_key):
        with pytest.raises(ConfigError):
            make(name)


@pytest.mark.parametrize("transaction", ["", HEX32.upper(), HEX32[1:], HEX64, "../" + HEX32[3:], HEX32 + "\n"])
def test_transaction_ids_are_hex(transaction):
    with pytest.raises(ConfigError):
        keys.fragment_key(transaction, 0)


def test_parse_returns_what_was_made():
    assert keys.parse_pack_key(keys.pack_key(HEX64)) == HEX64
    assert keys.parse_manifest_key(keys.manifest_key(HEX64)) == HEX64
    assert keys.parse_transaction_key(keys.fragment_key(HEX32, 12)) == (HEX32, 12, False)
    assert keys.parse_transaction_key(keys.abort_key(HEX32, 0)) == (HEX32, 0, True)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "refs/r",
        "refs/r/5.1",
        "refs/r/000000000005",
        "refs/r/000000000005.000000",
        "refs/r/000000000005.000001.tmp",
        "refs/r/00000000000\uff15.000001",
        "refs/r r/000000000005.000001",
        "refs/%2E/000000000005.000001",
        "refs/../000000000005.000001",
        "refs/a%40b/000000000005.000001",
        "refs/r/tags/5x/y",
        "refs/r/tags/55",
        "refs/r/tags/..",
        "packs/ab/" + HEX64,
        "manifests/01/" + HEX64[1:],
        f"txn/{HEX32}/rank-01",
        f"txn/{HEX32}/rank--1",
        f"txn/{HEX32}/rank-99999999",
        f"txn/{HEX32}/rank-1.tmp",
        f"txn/{HEX32[1:]}/rank-1",
    ],
)
def test_strange_keys_do_not_parse(key):
    for parse in (
        keys.parse_ref_key,
        keys.parse_tag_key,
        keys.parse_pack_key,
        keys.parse_manifest_key,
        keys.parse_transaction_key,
    ):
        with pytest.raises(FormatError):
            parse(key)
