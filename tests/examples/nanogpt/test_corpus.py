import pytest
import torch
from corpus import ALPHABET, VOCAB_SIZE, Corpus, share_of, standard_library_text


@pytest.fixture(scope="module")
def corpus():
    return Corpus(standard_library_text(20_000))


def test_the_text_is_the_same_each_time_and_in_the_alphabet(corpus):
    assert len(corpus.text) == 20_000
    assert corpus.text == standard_library_text(20_000)
    assert standard_library_text(30_000).startswith(corpus.text)
    assert set(corpus.text) <= set(ALPHABET)


def test_the_alphabet_is_even_for_every_usual_number_of_ranks():
    assert len(set(ALPHABET)) == VOCAB_SIZE
    assert VOCAB_SIZE % 8 == 0


def test_tokens_spell_the_text(corpus):
    assert "".join(ALPHABET[token] for token in corpus.tokens[:100]) == corpus.text[:100]


def test_another_text_has_another_digest(corpus):
    assert Corpus(corpus.text + "x").digest != corpus.digest == Corpus(corpus.text).digest


def test_a_sample_is_a_function_of_seed_and_number(corpus):
    first = corpus.sample(1, 5, length=16)
    assert torch.equal(first, corpus.sample(1, 5, length=16))
    assert not torch.equal(first, corpus.sample(2, 5, length=16))
    assert not torch.equal(first, corpus.sample(1, 6, length=16))


def test_samples_reach_the_last_character():
    corpus = Corpus("abcd")
    lasts = {corpus.sample(0, index, length=2)[-1].item() for index in range(50)}
    assert lasts == {ALPHABET.index("c"), ALPHABET.index("d")}


def test_targets_are_the_inputs_moved_by_one(corpus):
    inputs, targets = corpus.batch(0, range(3), length=16)
    assert inputs.shape == targets.shape == (3, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_order_of_the_data_is_free_of_the_number_of_ranks(corpus, num_ranks):
    batch = range(16, 24)
    shares = [corpus.batch(7, share_of(rank, num_ranks, batch), length=8)[0] for rank in range(num_ranks)]
    assert torch.equal(torch.cat(shares), corpus.batch(7, batch, length=8)[0])


def test_unequal_shares_are_refused():
    with pytest.raises(ValueError, match="16 samples cannot be shared equally by 3 ranks"):
        share_of(0, 3, range(16))
