from __future__ import annotations

import pytest

from vescale_ckpt.errors import ConfigError
from vescale_ckpt.saving.options import SMALLEST_BUDGET_BYTES, SaveOptions


def test_the_defaults_and_the_smallest_values_are_good():
    SaveOptions()
    SaveOptions(host_budget_bytes=SMALLEST_BUDGET_BYTES, deadline_seconds=0.1, most_in_flight=1, pack_bytes=1 << 20)
    SaveOptions(retries=3, codec="zstd", on_failure="warn")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"host_budget_bytes": SMALLEST_BUDGET_BYTES - 1}, "32 MiB or more"),
        ({"codec": "lz4"}, "'raw' or 'zstd'"),
        ({"on_failure": "ignore"}, "'raise' or 'warn'"),
        ({"most_in_flight": 0}, "too small"),
        ({"retries": -1}, "too small"),
        ({"deadline_seconds": 0}, "too small"),
        ({"pack_bytes": 1000}, "too small"),
        ({"retries": 1, "host_budget_bytes": 64 << 20}, "give up one of the two"),
    ],
    ids=str,
)
def test_impossible_values_are_refused_at_once(values, words):
    with pytest.raises(ConfigError, match=words):
        SaveOptions(**values)
