import pytest

from vescale_storage.backends.checks import MAX_KEY_BYTES, check_key, check_prefix, check_range, past_end
from vescale_storage.errors import InvalidInputError


@pytest.mark.parametrize("key", ["a", "a/b", "a.b/..c/.d", "%20", "ä/ü", "x" * MAX_KEY_BYTES])
def test_good_keys(key):
    check_key(key, url="u")


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("", "empty"),
        ("/a", "empty component"),
        ("a//b", "empty component"),
        ("a/", "empty component"),
        (".", "'.' or '..'"),
        ("a/../b", "'.' or '..'"),
        ("a\tb", "control"),
        ("a\x7f", "control"),
        ("x" * (MAX_KEY_BYTES + 1), "1024 bytes"),
        ("ä" * 513, "1024 bytes"),
        ("a\ud800", "Unicode"),
    ],
)
def test_bad_keys(key, problem):
    with pytest.raises(InvalidInputError, match=problem) as caught:
        check_key(key, url="memory://place")
    assert caught.value.context == {"key": key}
    assert "memory://place" in str(caught.value)


@pytest.mark.parametrize("prefix", ["", "a", "a/", "a/b", "a/.", "a/..", "."])
def test_good_prefixes(prefix):
    check_prefix(prefix, url="u")


@pytest.mark.parametrize("prefix", ["/", "/a", "a//", "a//b", "../", "../a", "a/../b", "./a", "a\nb"])
def test_bad_prefixes(prefix):
    with pytest.raises(InvalidInputError, match="cannot list"):
        check_prefix(prefix, url="u")


def test_ranges():
    check_range("k", 0, url="u")
    with pytest.raises(InvalidInputError, match=r"'k' in u from offset -1"):
        check_range("k", -1, url="u")


def test_past_end_says_what_and_where():
    error = past_end("k", 5, 10, 12, url="u")
    assert str(error).startswith("cannot read bytes 5..15 of 'k' in u: the object has only 12 bytes")
    assert error.context == {"key": "k"}
