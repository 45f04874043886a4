import pytest

from vescale_ckpt.errors import InvalidInputError
from vescale_train.timeline.span import KIND_OF_NAME, Kind, kind_of


@pytest.mark.parametrize("word", KIND_OF_NAME)
@pytest.mark.parametrize("rest", ["", " 3", ".block.2", "-grad", "_norm"])
def test_the_first_word_of_a_name_tells_the_kind(word, rest):
    assert kind_of(word + rest) is KIND_OF_NAME[word]


@pytest.mark.parametrize("name", ["", "else", "forwards", "my forward", " forward"])
def test_other_names_tell_nothing(name):
    assert kind_of(name) is Kind.OTHER


def test_a_span_that_ends_before_it_begins_is_refused(span):
    with pytest.raises(InvalidInputError, match="'forward' of rank 2 ends 1000000 ns before"):
        span("forward", 2, 5, 4)
    assert span("forward", 2, 5, 5).duration_ns == 0
