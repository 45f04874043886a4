import subprocess
import sys

import pytest

import vescale_train as vt


def test_all_public_names_are_there_and_told():
    for name in vt.__all__:
        assert callable(getattr(vt, name)) or name.isupper(), name
    assert set(vt.__all__) <= set(dir(vt))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        vt.nothing  # noqa: B018 - asked for


def test_every_name_that_is_looked_up_is_listed_once():
    names = [name for names in vt._ROOMS.values() for name in names]
    assert sorted([*names, "data"]) == sorted(vt.__all__)


def test_the_function_stays_what_it_is_whatever_is_imported_in_whatever_order():
    code = (
        "import vescale_train.data.stream, vescale_train as vt, vescale_train.data; "
        "from vescale_train.data import Data; assert callable(vt.data), vt.data"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
