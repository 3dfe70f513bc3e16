"""Torch's own random state: a run touches the generators of the CPU and of its device only."""

import pytest
import torch

from fineprune.training.random_state import (
    random_state,
    reseed,
    seeded,
    set_random_state,
)


def test_the_states_come_back_even_after_an_error():
    before = torch.get_rng_state()

    def fail():
        with seeded(5, "cpu"):
            torch.rand(3)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.equal(before, torch.get_rng_state())


def test_a_seed_gives_torchs_own_draws():
    torch.manual_seed(5)
    expected = torch.rand(3)
    with seeded(5, "cpu"):
        assert torch.equal(torch.rand(3), expected)


def test_a_saved_state_continues_and_other_ranks_draw_other_numbers():
    with seeded(5, "cpu"):
        state = random_state("cpu")
        first = torch.rand(3)
        reseed(5, 1, "cpu")
        assert not torch.equal(torch.rand(3), first)
        set_random_state(state, "cpu")
        assert torch.equal(torch.rand(3), first)


@pytest.fixture
def gpus(monkeypatch):
    """Generators of three GPUs, which torch has none of on a machine without a GPU."""
    generators = tuple(torch.Generator().manual_seed(number) for number in range(3))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    return generators


@pytest.mark.parametrize(("device", "own"), [("cuda", 1), ("cuda:0", 0), ("cuda:2", 2)])
def test_only_the_generator_of_the_own_gpu_is_touched(device, own, gpus):
    before = [generator.get_state() for generator in gpus]

    def changed():
        return [not torch.equal(g.get_state(), b) for g, b in zip(gpus, before, strict=True)]

    only_own = [number == own for number in range(3)]
    with seeded(5, device):
        assert changed() == only_own
        assert gpus[own].initial_seed() == 5
        state = random_state(device)
        assert torch.equal(state["cuda"], gpus[own].get_state())
        reseed(5, 1, device)
        assert changed() == only_own
        set_random_state(state, device)
        assert torch.equal(state["cuda"], gpus[own].get_state())
    assert changed() == [False] * 3


def test_the_generator_of_mps_is_seeded_and_restored(monkeypatch):
    mps = torch.Generator().manual_seed(1)
    monkeypatch.setattr(torch.mps, "_get_default_mps_generator", lambda: mps)
    before = mps.get_state()
    with seeded(5, "mps"):
        assert mps.initial_seed() == 5
        assert torch.equal(random_state("mps")["mps"], mps.get_state())
    assert torch.equal(mps.get_state(), before)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_on_gpus_the_draws_are_those_of_the_seed_and_the_others_stay():
    torch.cuda.manual_seed_all(7)
    before = torch.cuda.get_rng_state_all()
    with seeded(5, "cuda:1"):
        first = torch.rand(3, device="cuda:1")
    with seeded(5, "cuda:1"):
        assert torch.equal(torch.rand(3, device="cuda:1"), first)
    for state, old in zip(torch.cuda.get_rng_state_all(), before, strict=True):
        assert torch.equal(state, old)


def test_a_state_of_a_gpu_is_continued_on_a_cpu_as_far_as_it_can():
    with seeded(5, "cpu"):
        state = random_state("cpu")
        first = torch.rand(3)
        set_random_state({**state, "cuda": torch.zeros(16, dtype=torch.uint8)}, "cpu")
        assert torch.equal(torch.rand(3), first)
