"""The flat tensor of all parameters, and which part of it each server holds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fineprune.distributed.parameter_servers.flat_layout import flat_layout, not_served


def make_model():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5))


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8), servers=st.integers(1, 12))
def test_servers_hold_every_element_once_and_equally_many(sizes, servers):
    model = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)
    if servers > sum(sizes):
        with pytest.raises(ValueError, match="servers"):
            flat_layout(model, servers)
        return
    layout = flat_layout(model, servers)
    held = [range(layout.elements)[layout.part(server)] for server in range(servers)]
    assert [element for part in held for element in part] == list(range(sum(sizes)))
    assert max(map(len, held)) - min(map(len, held)) <= 1
    for server, part in enumerate(held):
        pieces = [size for _, size in layout.pieces(server)]
        assert sum(pieces) == len(part)
        assert min(pieces) > 0
        # No piece holds elements of two parameters.
        ends = {part.start + sum(pieces[: i + 1]) for i in range(len(pieces))}
        assert {offset for offset in layout.offsets if part.start < offset < part.stop} <= ends


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_bound_model_lives_in_the_flat_tensors(memory_format):
    model = make_model().to(memory_format=memory_format)
    twin = make_model()
    twin.load_state_dict(model.state_dict())
    layout = flat_layout(model)
    values, gradients = layout.bind(model)
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    model(x).square().sum().backward()
    twin(x).square().sum().backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one.grad, other.grad)
        assert one.ndim < 4 or one.is_contiguous(memory_format=memory_format)
    assert gradients.abs().sum() > 0
    values.fill_(0.5)
    gradients.zero_()
    for parameter in model.parameters():
        assert parameter.eq(0.5).all()
        assert parameter.grad.eq(0).all()


def test_a_flat_copy_loads_into_a_model_of_the_same_layout():
    model, other = make_model(), make_model()
    layout = flat_layout(model, 3)
    assert repr(layout) == repr(flat_layout(other, 3))
    layout.load(other, layout.flat(model))
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, another)


def test_other_shapes_types_and_numbers_of_servers_are_other_layouts():
    model = make_model()
    layouts = [
        flat_layout(model),
        flat_layout(model, 2),
        flat_layout(make_model().to(memory_format=torch.channels_last)),
        flat_layout(make_model().double()),
        flat_layout(nn.Linear(2, 2)),
    ]
    assert len(set(map(repr, layouts))) == len(layouts)


@pytest.mark.parametrize("servers", [1, 2, 5])
def test_each_piece_belongs_to_the_parameter_that_it_holds(servers):
    model = make_model()
    layout = flat_layout(model, servers)
    for number, (_, parameter) in enumerate(model.named_parameters()):
        torch.nn.init.constant_(parameter, number)
    values = layout.flat(model)
    names = [name for name, _ in model.named_parameters()]
    for server in range(servers):
        owners, sizes = map(list, zip(*layout.pieces(server), strict=True))
        pieces = values[layout.part(server)].split(sizes)
        held = [names[int(piece[0])] for piece in pieces]
        assert all(piece.eq(piece[0]).all() for piece in pieces)
        assert owners == held


def test_frozen_parameters_stay_where_they_are():
    model, other = make_model(), make_model()
    for one in (model, other):
        one[0].requires_grad_(False)
    layout = flat_layout(model, 2)
    assert layout.names == ("1.weight", "1.bias", "3.weight", "3.bias")
    assert list(not_served(model)) == [
        *("1.running_mean", "1.running_var", "1.num_batches_tracked", "0.weight", "0.bias")
    ]
    before = other[0].weight.clone()
    layout.load(other, layout.flat(model))
    assert torch.equal(other[3].weight, model[3].weight)
    assert torch.equal(other[0].weight, before)
    values, _ = layout.bind(model)
    values.zero_()
    assert model[3].weight.eq(0).all()
    assert model[0].weight.ne(0).any()
    assert model[0].weight.grad is None


def frozen():
    return nn.Linear(2, 2).requires_grad_(False)


def mixed():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())


@pytest.mark.parametrize(
    ("model", "servers", "what"),
    [
        (nn.Linear(2, 2), 7, "1 to 6 servers"),
        (nn.Linear(2, 2), 0, "1 to 6 servers"),
        (nn.Flatten(), 1, "with parameters"),
        (nn.Linear(2, 2).half(), 1, "float16"),
        (mixed(), 1, "float32, float64"),
        (frozen(), 1, "with parameters to train"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(model, servers, what):
    with pytest.raises(ValueError, match=what) as raised:
        flat_layout(model, servers)
    assert "\n" not in str(raised.value)


def test_a_parameter_is_divided_where_no_optimizer_kernel_rounds_differently():
    model = nn.Sequential(nn.Linear(77, 53), nn.Linear(53, 101))
    for servers in (2, 3, 5):
        layout = flat_layout(model, servers)
        parts = [layout.part(server) for server in range(servers)]
        assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
        assert (parts[0].start, parts[-1].stop) == (0, layout.elements)
        for part in parts:
            begins = max(offset for offset in layout.offsets if offset <= part.start)
            assert (part.start - begins) % 64 == 0
            assert abs(part.stop - part.start - layout.elements / servers) <= 64


def test_each_server_of_a_small_model_has_a_part():
    layout = flat_layout(nn.Linear(3, 2), 4)
    assert [layout.part(server).stop for server in range(4)] == [2, 4, 6, 8]
