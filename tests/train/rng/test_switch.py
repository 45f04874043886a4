from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from vescale_train.errors import ConfigError, InvalidInputError, LayoutError, StateError
from vescale_train.rng import active, initialize, single_device_rng


class Net(nn.Module):
    """Two blocks with dropout, one of them used twice."""

    def __init__(self, use_reentrant=None, **more):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
        self.outer = nn.Dropout(0.3)
        self.use_reentrant, self.more = use_reentrant, more

    def forward(self, x):
        for _ in range(2):
            if self.use_reentrant is None:
                x = self.inner(x)
            else:
                x = checkpoint(self.inner, x, use_reentrant=self.use_reentrant, **self.more)
        return self.outer(x)


DRAWS = {
    "rand": lambda: torch.rand(5),
    "randn": lambda: torch.randn(5, dtype=torch.float64),
    "randint": lambda: torch.randint(-3, 9, (5,)),
    "randperm": lambda: torch.randperm(9),
    "rand_like": lambda: torch.rand_like(torch.ones(5)),
    "randint_like": lambda: torch.randint_like(torch.ones(5), 4),
    "normal": lambda: torch.normal(torch.zeros(5), torch.arange(5.0)),
    "normal of numbers": lambda: torch.normal(1.0, 2.0, (5,)),
    "bernoulli": lambda: torch.bernoulli(torch.full((9,), 0.5)),
    "bernoulli p": lambda: torch.bernoulli(torch.ones(9), 0.5),
    "bernoulli_": lambda: torch.ones(9, dtype=torch.bool).bernoulli_(),
    "exponential_": lambda: torch.empty(5).exponential_(2.0),
    "random_": lambda: torch.empty(5, dtype=torch.int8).random_(),
    "random_ to": lambda: torch.empty(5).random_(100),
    "random_ from": lambda: torch.empty(5, dtype=torch.int64).random_(5, None),
    "uniform_ named": lambda: torch.empty(5).uniform_(to=3.0),
    "dropout": lambda: functional.dropout(torch.ones(9), 0.5),
    "alpha_dropout": lambda: functional.alpha_dropout(torch.ones(9), 0.5, training=True),
    "dropout2d": lambda: functional.dropout2d(torch.ones(4, 4, 2, 2), 0.5),
    "native_dropout": lambda: torch.native_dropout(torch.ones(9), 0.5, True)[0],
    "gumbel": lambda: functional.gumbel_softmax(torch.ones(5)),
    "attention": lambda: functional.scaled_dot_product_attention(*[torch.ones(1, 2, 5, 4)] * 3, dropout_p=0.5),
    "kaiming": lambda: nn.init.kaiming_uniform_(torch.empty(3, 3)),
    "xavier": lambda: nn.init.xavier_normal_(torch.empty(3, 3)),
    "trunc_normal": lambda: nn.init.trunc_normal_(torch.empty(9)),
    "orthogonal": lambda: nn.init.orthogonal_(torch.empty(3, 3)),
    "Linear": lambda: nn.Linear(3, 3).weight.data,
    "bfloat16": lambda: torch.randn(5, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_seed_alone_decides_and_a_second_draw_differs(name):
    make = DRAWS[name]
    torch.manual_seed(1)
    with single_device_rng(5):
        first, second = make(), make()
    torch.manual_seed(2)
    with single_device_rng(5):
        again = make()
    with single_device_rng(6):
        other = make()
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)


def test_numbers_are_the_same_for_every_dtype_and_order_of_memory():
    with single_device_rng(0) as rng:
        made = []
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            rng.start_step(0)
            made.append(torch.randn(40, 30, dtype=dtype))
        rng.start_step(0)
        turned = torch.empty(30, 40).t().normal_()
    assert all(torch.equal(made[0].to(m.dtype), m) for m in made)
    assert torch.equal(turned, made[1])


def test_uniform_numbers_stay_below_their_bound_in_every_dtype():
    with single_device_rng(0):
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            for low, high in ((0, 1), (-1, 1), (0.1, 0.3), (5, 5)):
                made = torch.empty(20_000, dtype=dtype).uniform_(low, high).double()
                assert made.min() >= torch.tensor(low, dtype=dtype)
                assert made.max() < high or low == high


def test_outside_nothing_is_changed():
    torch.manual_seed(3)
    want = torch.rand(4), torch.randn(4), nn.init.trunc_normal_(torch.empty(4))
    torch.manual_seed(3)
    one = torch.rand(4)
    with single_device_rng(0):
        torch.rand(100)
    assert active() is None
    assert all(map(torch.equal, want, (one, torch.randn(4), nn.init.trunc_normal_(torch.empty(4)))))


def test_a_generator_of_its_own_is_left_to_decide():
    def draw():
        return torch.rand(4, generator=torch.Generator().manual_seed(3))

    want, order = draw(), torch.randperm(9, generator=torch.Generator().manual_seed(3))
    with single_device_rng(0):
        assert torch.equal(draw(), want)
        assert torch.equal(torch.randperm(9, generator=torch.Generator().manual_seed(3)), order)


def test_manual_seed_begins_again():
    with single_device_rng(5):
        first = torch.rand(4), torch.rand(4)
    with single_device_rng(0) as rng:
        torch.rand(7)
        torch.manual_seed(5)
        assert all(map(torch.equal, first, (torch.rand(4), torch.rand(4))))
        assert rng.seed == 5


def test_modules_draw_under_their_own_names():
    net = Net().train()
    x = torch.ones(4, 6)
    with single_device_rng(0, net) as rng:
        torch.rand(3)  # other draws before do not matter to a module
        whole = net(x)
        again = net(x)
        rng.start_step(0)
        assert torch.equal(net(x), whole)
        assert not torch.equal(again, whole)
        rng.start_step(1)
        assert not torch.equal(net(x), whole)
        rng.name_modules(net.outer, "outer")  # a stage that has only this
        rng.start_step(0)
        dropped = net.outer(torch.ones(4, 6)) == 0
        assert dropped.any()
        assert (whole[dropped] == 0).all()


def test_a_module_that_fails_leaves_no_name_behind():
    net = nn.Sequential(nn.Linear(2, 2))
    with single_device_rng(0, net) as rng:
        with pytest.raises(RuntimeError):
            net(torch.ones(3))
        assert rng._stream.names == []


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_repeats_the_numbers_of_the_forward_pass(use_reentrant):
    x = torch.randn(4, 6)
    grads = []
    for net in (Net(), Net(use_reentrant)):
        with single_device_rng(0, net) as rng:
            initialize(net)
            a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
            with rng.batch(0, 4, 8):
                first = net(a)
            with rng.batch(4, 4, 8):
                second = net(b)
            first.sum().backward()  # after the forward of the second, as pipelines do
            second.sum().backward()
            after = torch.rand(3)
        grads.append([first, second, a.grad, b.grad, after, *(p.grad for p in net.parameters())])
    assert all(map(torch.equal, *(made[:5] for made in grads)))
    torch.testing.assert_close(*grads)  # a reentrant backward pass adds what a weight used twice gets in another order


def test_checkpointing_that_forgets_the_numbers_is_an_error():
    net = Net(False, preserve_rng_state=False, determinism_check="none")
    with single_device_rng(0, net):
        out = net(torch.ones(4, 6, requires_grad=True))
        with pytest.raises(
            StateError, match=r"'inner.1' draws random numbers in the backward pass.*preserve_rng_state"
        ):
            out.sum().backward()


@pytest.mark.parametrize("parts", [[8], [4, 4], [1] * 8, [3, 3, 2], [5, 3]])
def test_a_sample_has_its_numbers_in_any_micro_batch(parts):
    net = Net()
    x = torch.randn(8, 3, 6)
    with single_device_rng(1, net) as rng:
        initialize(net)
        with rng.batch(0, 8, 8):
            want = net(x)
        rng.start_step(0)
        got, start = [], 0
        for count in parts:
            with rng.batch(start, count, 8):
                got.append(net(x[start : start + count].reshape(-1, 6)).view(count, 3, 6))  # tokens in one dim
            start += count
    assert torch.equal(torch.cat(got) == 0, want == 0)
    torch.testing.assert_close(torch.cat(got), want)


def test_the_batch_may_be_another_dim_and_heads_may_be_cut_too():
    with single_device_rng(1) as rng:
        with rng.batch(0, 4, 4, dim=1):
            whole = torch.rand(5, 4, 6)
        rng.start_step(0)
        with rng.batch(1, 2, 4, dim=1), rng.part(2, 3, 3, 6):
            part = torch.rand(5, 2, 3)
    assert torch.equal(part, whole[:, 1:3, 3:])


def test_what_is_shared_is_the_same_for_all_samples():
    with single_device_rng(1) as rng:
        with rng.batch(0, 3, 6), rng.shared():
            one = torch.rand(7)
        with rng.batch(3, 3, 6):
            with rng.shared():
                other = torch.rand(7)
            with pytest.raises(LayoutError, match="does not divide into the 3 elements"):
                torch.rand(7)
    assert torch.equal(one, other)


def test_samples_are_drawn_for_once_in_a_step():
    with single_device_rng(1) as rng:
        with rng.batch(0, 4, 8):
            pass
        with pytest.raises(StateError, match=r"samples 3 to 5 .* samples 0 to 4 .* step 0"), rng.batch(3, 2, 8):
            pass
        rng.start_step()
        with rng.batch(3, 2, 8):
            pass


def test_the_state_goes_on_where_it_was_saved():
    with single_device_rng(4) as rng:
        rng.start_step(3)
        torch.rand(5)
        with rng.named("a.b"):
            torch.rand(5)
        state = rng.state_dict()
        want = torch.rand(5)
    assert state == {"format": 1, "seed": 4, "step": 3, "calls": {"": 1, "a.b": 1}}
    torch.manual_seed(9)
    untouched = torch.default_generator.initial_seed()
    rng = single_device_rng(0)
    rng.load_state_dict(state)
    assert torch.default_generator.initial_seed() == untouched
    with rng:
        assert torch.equal(torch.rand(5), want)


@pytest.mark.parametrize("state", [{}, None, {"format": 2, "seed": 0, "step": 0, "calls": {}}])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(ConfigError, match="state of random numbers"):
        single_device_rng(0).load_state_dict(state)


def test_there_is_one_switch_and_seeds_have_bounds():
    with single_device_rng(0), pytest.raises(StateError, match="on already"), single_device_rng(1):
        pass
    for seed in (-1, 2**64):
        with pytest.raises(ConfigError, match="at least 0 and less than"):
            single_device_rng(seed)
    with single_device_rng(2**64 - 1) as rng, pytest.raises(ConfigError, match="not negative"):
        rng.start_step(-1)


def test_initialize_gives_a_part_the_numbers_of_the_whole():
    net, part = Net(), Net().inner
    with single_device_rng(0):
        initialize(net)
    with single_device_rng(0):
        initialize(part, prefix="inner")
    assert torch.equal(net.inner[0].weight, part[0].weight)
    with pytest.raises(StateError, match="needs single_device_rng"):
        initialize(net)
    holder = nn.Module()
    holder.p = nn.Parameter(torch.ones(2))
    with single_device_rng(0), pytest.raises(InvalidInputError, match="has no reset_parameters"):
        initialize(holder)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: torch.empty(3).geometric_(0.5), "geometric_"),
        (lambda: torch.poisson(torch.ones(3)), "poisson"),
        (lambda: torch.multinomial(torch.ones(3), 2), "multinomial"),
        (lambda: functional.rrelu(torch.ones(3), training=True), "rrelu"),
        (lambda: torch.randn(3, dtype=torch.complex64), "not torch.complex64"),
        (lambda: torch.empty(3).normal_(0, -1), "standard deviation"),
        (lambda: torch.empty(3).uniform_(2, 1), "bounds in order"),
        (lambda: torch.empty(3).bernoulli_(1.5), "needs a probability"),
        (lambda: torch.bernoulli(torch.full((3,), 2.0)), "not in"),
        (lambda: torch.empty(3).exponential_(0.0), "positive rate"),
        (lambda: nn.init.trunc_normal_(torch.empty(3), generator=torch.Generator()), "leave it out"),
    ],
)
def test_what_no_index_addresses_is_refused(call, text):
    with single_device_rng(0), pytest.raises(InvalidInputError, match=text):
        call()
