import pytest
import torch
from model import GPT, SIZES, GPTConfig, token_loss


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(GPTConfig.of_size("tiny", 96))


def test_logits_have_one_row_a_position(model):
    tokens = torch.randint(96, (2, 10))
    assert model(tokens).shape == (2, 10, 96)


def test_no_position_sees_a_later_one(model):
    tokens = torch.randint(96, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (tokens[0, 7] + 1) % 96
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :7], after[0, :7])
    assert not torch.equal(before[0, 7:], after[0, 7:])


def test_embedding_and_output_matrix_are_one_parameter(model):
    assert model.head.weight is model.token.weight
    assert "head.weight" in model.state_dict()


def test_an_untrained_model_guesses_evenly(model):
    tokens = torch.randint(96, (8, 32))
    loss = token_loss(model(tokens), torch.randint(96, (8, 32)))
    assert loss.item() == pytest.approx(torch.tensor(96.0).log().item(), abs=0.1)


@pytest.mark.parametrize(("name", "millions"), [("baby", 10.8), ("gpt2", 124.4), ("gpt2-xl", 1557)])
def test_size_classes_are_those_of_nanogpt(name, millions):
    vocab_size = 96 if name == "baby" else 50304
    with torch.device("meta"):
        model = GPT(GPTConfig.of_size(name, vocab_size))
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)


def test_impossible_configurations_are_refused():
    with pytest.raises(ValueError, match="'huge'; choose one of tiny, "):
        GPTConfig.of_size("huge", 96)
    with pytest.raises(ValueError, match="width 10 cannot be cut into 4 heads"):
        GPTConfig(num_layers=1, num_heads=4, width=10, context=8, vocab_size=96)
    assert all(width % num_heads == 0 for _, num_heads, width, _ in SIZES.values())
