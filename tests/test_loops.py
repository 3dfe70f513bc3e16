"""Loops as strangers write them: each trains what was planned, or fails in one clear line."""

import copy
import itertools
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import fineprune as fp
from fineprune.errors import InputError

N, BATCH, EPOCHS = 96, 8, 6
RATES = [1.0, 1.0, 1.0, 0.1, 0.1, 0.01]


def data(n=N):
    chance = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=chance)
    return TensorDataset(x, (x.sum(1) > 0).long())


def network():
    layer = torch.nn.Linear(4, 2)
    with torch.no_grad():
        layer.weight.fill_(0.01)
        layer.bias.zero_()
    return layer


def new(policy=None, **options):
    policy = policy or fp.Adaptive(EPOCHS, save=0.35, rates=RATES)
    return fp.Pruner(data(), policy, **{"batch_size": BATCH, "seed": 1, **options})


class Run:
    """A network that is trained, and which samples it was trained on in which epoch."""

    def __init__(self):
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.seen = []

    def losses(self, x, y):
        return F.cross_entropy(self.model(x), y, reduction="none")

    def step(self, pruner, index, batch, backward=True):
        """Take one training step, as the README's loop does."""
        x, y = batch
        loss = pruner.record(index, self.losses(x, y))
        self.seen.append((pruner.plan.epoch, index.tolist()))
        if backward:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def plain(pruner, run):
    for _ in pruner.epochs():
        for index, batch in pruner.loader():
            run.step(pruner, index, batch)


def for_each_batch(pruner, run):
    for index, batch in (batch for _ in pruner.epochs() for batch in pruner.loader()):
        run.step(pruner, index, batch)


def mixed_precision(pruner, run):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in pruner.epochs():
        for index, (x, y) in pruner.loader():
            loss = pruner.record(index, run.losses(x, y))
            run.seen.append((pruner.plan.epoch, index.tolist()))
            scaler.scale(loss).backward()
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()


def own_loader(pruner, run):
    loader = DataLoader(pruner.dataset, batch_size=BATCH, sampler=pruner.sampler)
    for _ in pruner.epochs():
        for index, batch in loader:
            run.step(pruner, index, batch)


def set_epoch_only(pruner, run):
    loader = pruner.loader()
    for epoch in range(EPOCHS):
        pruner.sampler.set_epoch(epoch)
        for index, batch in loader:
            run.step(pruner, index, batch)
    pruner.end_epoch()


def arrays_in_memory(pruner, run):
    x, y = pruner.dataset.tensors
    for _ in pruner.epochs():
        for index in pruner.sampler.order().split(BATCH):
            run.step(pruner, index, (x[index], y[index]))


def prefetcher(pruner, run):
    """A thread that is two batches ahead."""
    for _ in pruner.epochs():
        ahead: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        free, done = threading.Semaphore(2), threading.Event()

        def fill(ahead=ahead, free=free, done=done):
            try:
                for item in pruner.loader():
                    free.acquire()
                    ahead.append(item)
            finally:
                done.set()

        thread = threading.Thread(target=fill, daemon=True)
        thread.start()
        while not done.is_set() or ahead:
            if ahead:
                run.step(pruner, *ahead.pop(0))
                free.release()
        thread.join()


def resume_from_the_middle(pruner, run):
    for _ in pruner.epochs():
        for index, batch in itertools.islice(pruner.loader(), 3):
            run.step(pruner, index, batch)
        break
    state = pruner.state_dict()
    again = new()
    again.load_state_dict(state)
    plain(again, run)
    return again


def interrupted_notebook_cell(pruner, run):
    def cell(stop):
        for epoch in pruner.epochs():
            for number, (index, batch) in enumerate(pruner.loader()):
                run.step(pruner, index, batch)
                if (epoch, number) == stop:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cell(stop=(2, 4))
    cell(stop=None)


RIGHT = [
    plain,
    for_each_batch,
    mixed_precision,
    own_loader,
    set_epoch_only,
    arrays_in_memory,
    prefetcher,
    resume_from_the_middle,
    interrupted_notebook_cell,
]


@pytest.fixture(scope="module")
def expected():
    pruner, run = new(), Run()
    plain(pruner, run)
    assert pruner.steps_done == pruner.total_steps() == len(run.seen) < EPOCHS * N / BATCH
    return run


@pytest.mark.parametrize("loop", RIGHT, ids=lambda loop: loop.__name__)
def test_a_loop_trains_what_was_planned_bit_for_bit(loop, expected):
    pruner, run = new(), Run()
    pruner = loop(pruner, run) or pruner
    assert run.seen == expected.seen
    assert torch.equal(run.model.weight, expected.model.weight)
    assert pruner.steps_done == pruner.total_steps()
    assert f"{EPOCHS} of {EPOCHS} epochs done" in repr(pruner)


def test_accumulation_takes_as_many_steps_as_planned():
    pruner, run, steps = new(accumulation=5), Run(), 0
    for _ in pruner.epochs():
        for index, batch in pruner.loader():
            x, y = batch
            pruner.record(index, run.losses(x, y)).backward()
            assert pruner.steps_done == steps + pruner.step_is_due
            if pruner.step_is_due:
                run.optimizer.step()
                run.optimizer.zero_grad()
                steps += 1
    assert steps == pruner.total_steps() == pruner.steps_done


# --- loops that are wrong ------------------------------------------------------------------------


def forgets_epochs(pruner, run):
    for _ in range(EPOCHS):
        for index, batch in pruner.loader():
            run.step(pruner, index, batch)


def cycles_the_loader(pruner, run):
    for index, batch in itertools.islice(itertools.cycle(pruner.loader()), 100):
        run.step(pruner, index, batch)


def two_passes_per_epoch(pruner, run):
    for _ in pruner.epochs():
        for _ in range(2):
            for index, batch in pruner.loader():
                run.step(pruner, index, batch)


def records_validation(pruner, run):
    for _ in pruner.epochs():
        for loader in (pruner.loader(), DataLoader(fp.Indexed(data()), batch_size=BATCH)):
            for index, batch in loader:
                run.step(pruner, index, batch)


def loader_without_the_sampler(pruner, run):
    for _ in pruner.epochs():
        for index, batch in DataLoader(pruner.dataset, batch_size=BATCH, shuffle=True):
            run.step(pruner, index, batch)


def ranks_by_hand(pruner, run):
    plain(new(num_replicas=2, rank=0), run)


def one_loss_for_all(pruner, run):
    for _ in pruner.epochs():
        for index, (x, y) in pruner.loader():
            loss = F.cross_entropy(run.model(x), y)
            pruner.record(index, loss.expand(len(index))).backward()


def notebook_cell_run_twice(pruner, run):
    plain(pruner, run)
    plain(pruner, run)


def loads_inside_the_loop(pruner, run):
    for epoch in pruner.epochs():
        state = pruner.state_dict()
        for index, batch in pruner.loader():
            run.step(pruner, index, batch)
        if epoch == 2:
            pruner.load_state_dict(state)


def detaches_weighted_losses(pruner, run):
    pruner = new(fp.InfoBatch(EPOCHS))
    for _ in pruner.epochs():
        for index, (x, y) in pruner.loader():
            losses = run.losses(x, y)
            pruner.record(index, losses.detach())
            losses.mean().backward()
            run.optimizer.step()


def records_inside_a_checkpoint(pruner, run):
    def step(index, x, y):
        return pruner.record(index, run.losses(x, y)).exp()

    for _ in pruner.epochs():
        for index, (x, y) in pruner.loader():
            checkpoint(step, index, x.requires_grad_(), y, use_reentrant=False).backward()


OVERFULL = r"expected at most \d+ samples in epoch \d, .*pruner\.epochs\(\)"
WRONG = {
    forgets_epochs: (InputError, OVERFULL),
    cycles_the_loader: (InputError, OVERFULL),
    two_passes_per_epoch: (InputError, OVERFULL),
    records_validation: (InputError, OVERFULL),
    loader_without_the_sampler: (InputError, r"samples that epoch \d trains.*pruner\.sampler"),
    ranks_by_hand: (InputError, "expected 2 ranks that exchange their losses"),
    one_loss_for_all: (InputError, 'one number that was expanded: use reduction="none"'),
    notebook_cell_run_twice: (InputError, "trained all 6: make a new Pruner"),
    loads_inside_the_loop: (InputError, "load_state_dict.* before the loop over the epochs"),
    records_inside_a_checkpoint: (InputError, "record.* torch.utils.checkpoint .* outside of"),
    detaches_weighted_losses: (RuntimeError, "scalar that record.* backpropagated"),
}


@pytest.mark.parametrize("loop", WRONG, ids=lambda loop: loop.__name__)
def test_a_wrong_loop_fails_in_one_clear_line(loop):
    error, message = WRONG[loop]
    with pytest.raises(error, match=message) as caught:
        loop(new(), Run())
    assert "\n" not in str(caught.value)


POLICIES = {
    "fine-pruning": lambda: fp.FinePruning(fp.Schedule(EPOCHS, 3, 1), prune=24),
    "random": lambda: fp.RandomPruning(fp.Schedule(EPOCHS, 3, 1), prune=24),
    "rs2": lambda: fp.RS2(EPOCHS, save=0.35),
    "infobatch": lambda: fp.InfoBatch(EPOCHS, save=0.35, rescale=False),
    "full": lambda: fp.FullData(EPOCHS),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_loop_that_forgets_the_epochs_is_noticed_with_every_policy(policy):
    pruner = new(POLICIES[policy]())
    loader = DataLoader(pruner.dataset, batch_size=BATCH, sampler=pruner.sampler)
    with pytest.raises(InputError, match=OVERFULL):
        forgets_epochs_of_any(pruner, loader)
    assert pruner.position.samples == len(pruner.plan.kept)


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_batch_size_it_is_a_warning(policy):
    pruner = new(POLICIES[policy](), batch_size=None)
    loader = DataLoader(pruner.dataset, batch_size=BATCH, sampler=pruner.sampler)
    with pytest.warns(RuntimeWarning, match=r"loaded 3 times .*: loop over pruner.epochs\(\)"):
        forgets_epochs_of_any(pruner, loader)


def forgets_epochs_of_any(pruner, loader):
    for _ in range(EPOCHS):
        for index, (x, _) in loader:
            pruner.record(index, x.sum(1))


def test_a_loader_with_larger_batches_is_noticed_at_once():
    pruner, run = new(), Run()
    loader = DataLoader(pruner.dataset, batch_size=2 * BATCH, sampler=pruner.sampler)
    for _ in pruner.epochs():
        with pytest.raises(InputError, match=r"at most 8 samples .* got 16: give Pruner the batch"):
            run.step(pruner, *next(iter(loader)))
        break


def test_a_loader_with_smaller_batches_is_noticed_within_the_first_epoch():
    pruner, run = new(), Run()
    loader = DataLoader(pruner.dataset, batch_size=BATCH // 2, sampler=pruner.sampler)

    def train():
        for _ in pruner.epochs():
            for index, batch in loader:
                run.step(pruner, index, batch)

    with pytest.raises(InputError, match=f"{OVERFULL}.*the loader's batch size.* as a whole"):
        train()
    assert pruner.position == fp.Position(0, N // BATCH, N)


def test_a_loader_that_reads_ahead_into_the_next_epoch_is_an_error():
    """As the loaders do that keep their workers by one endless iterator."""

    class Endless(torch.utils.data.Sampler[int]):
        def __init__(self, sampler):
            self.sampler = sampler

        def __iter__(self):
            while True:
                yield from self.sampler

    pruner, run = new(fp.FullData(EPOCHS)), Run()
    loader = DataLoader(pruner.dataset, BATCH, sampler=Endless(pruner.sampler), num_workers=1)
    batches = iter(loader)

    def train():
        for _ in pruner.epochs():
            for _ in range(N // BATCH):
                run.step(pruner, *next(batches))

    with pytest.raises(InputError, match="an iterator that began in the epoch before"):
        train()
    assert {epoch for epoch, _ in run.seen} == {0}


def gaps_noticed(records):
    """Train by a loop that records what a function returns of each batch; return the warnings."""
    pruner = new(fp.FullData(EPOCHS))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in pruner.epochs():
            for number, (index, _) in enumerate(pruner.loader()):
                recorded = records(number, index)
                if len(recorded):
                    pruner.record(recorded, torch.rand(len(recorded)))
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    "records",
    [
        lambda number, index: index if number % 2 else index[:0],
        lambda number, index: index if number != 3 else index[:0],
        lambda number, index: index if number < 5 else index[:0],
    ],
    ids=["every second batch", "all but one", "breaks off"],
)
def test_a_loop_that_records_fewer_batches_than_planned_is_told_once(records):
    (said,) = gaps_noticed(records)
    assert "epoch 1 recorded the batches of" in said
    assert "of 96 samples" in said


def test_a_loop_that_leaves_samples_out_of_its_batches_is_not_warned_of_them():
    assert not gaps_noticed(lambda number, index: index[index % 12 != 0])


# --- copies, states, and going back --------------------------------------------------------------


def test_a_copy_made_inside_the_loop_can_load_a_state():
    pruner = new()
    for _ in pruner.epochs():
        copied = copy.deepcopy(pruner)
        copied.load_state_dict(new().state_dict())
        copied.set_epoch(3)
        assert (copied.plan.epoch, pruner.plan.epoch) == (3, 0)
        break


def numpys(kind: str, value: float) -> Any:
    """Return a number of NumPy, which is none of Python's."""
    return np.dtype(kind).type(value)


NUMPYS = [
    fp.Adaptive(
        EPOCHS,
        numpys("f8", 0.3),
        rates=np.linspace(1, 0.1, EPOCHS),
        threshold=numpys("f4", 0.5),
        returning=numpys("f4", 0.25),
        first_epoch=numpys("i8", 2),
    ),
    fp.Adaptive(EPOCHS, rates=torch.linspace(1, 0.1, EPOCHS), threshold=numpys("f8", 0.5)),
    fp.FinePruning(fp.Schedule(EPOCHS, 3, 1), numpys("f8", 0.25), tolerance=numpys("f4", 0.1)),
    fp.FinePruning(fp.Schedule(EPOCHS, numpys("i4", 3), numpys("i8", 1)), 24),
    fp.InfoBatch(EPOCHS, numpys("f8", 0.5), anneal=numpys("f8", 0.2)),
    fp.RePB(EPOCHS, numpys("f8", 0.25)),
    fp.RS2(EPOCHS, numpys("f8", 0.25)),
    fp.RandomPruning(fp.Schedule(EPOCHS, 3, 1), numpys("i4", 24)),
]


@pytest.mark.parametrize("policy", NUMPYS, ids=lambda policy: policy.name)
def test_what_a_pruner_accepts_can_be_saved_and_loaded(policy, tmp_path):
    def make():
        options = {"batch_size": numpys("i8", BATCH), "seed": numpys("i8", 3)}
        return fp.Pruner(numpys("i8", N), policy, drop_last=True, **options)

    pruner = make()
    pruner.start_epoch(0)
    pruner.observe(pruner.sampler.order()[:BATCH], torch.rand(BATCH))
    torch.save(pruner.state_dict(), tmp_path / "state.pt")
    again = make()
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert again.position == pruner.position


def test_a_policy_whose_state_cannot_be_loaded_is_named():
    class Own(fp.FullData):
        name = "own"

        def state_dict(self):
            return {"seen": {"losses": np.zeros(3)}}

    with pytest.raises(InputError, match=r"\['learned'\]\['seen'\]\['losses'\].* got ndarray"):
        new(Own(3)).state_dict()


def unreadable(places, made):
    """Return the samples at some places of the first epoch, and a collate function without them."""
    order = list(made.sampler)
    gone = [order[place] for place in places]

    def collate(pairs):
        readable = [pair for pair in pairs if pair[0] not in gone]
        return fp.IndexedCollate(torch.utils.data.default_collate)(readable)

    return gone, collate


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stops", [(1,), (11,), (2, 1), (1, 3)])
@pytest.mark.parametrize(
    "places", [[], [2], [BATCH - 1], [2 * BATCH - 1], [3, BATCH + 1], [-1], range(0, N // 2, 5)]
)
def test_a_resume_goes_on_behind_samples_that_cannot_be_read(places, stops, ranks):
    def begin():
        shape: dict[str, Any] = {"batch_size": BATCH // ranks, "num_replicas": ranks, "rank": 0}
        return fp.Pruner(data(), fp.FullData(1), seed=3, **shape)

    gone, collate = unreadable(places, begin())

    def batches_of(pruner, stop=None):
        options: dict[str, Any] = {"sampler": pruner.sampler, "collate_fn": collate}
        loader = DataLoader(pruner.dataset, BATCH // ranks, **options)
        for _ in pruner.epochs():
            for number, (index, _) in enumerate(loader, 1):
                pruner.record(index, torch.ones(len(index)))
                yield index.tolist()
                if number == stop:
                    return

    expected = list(batches_of(begin()))
    assert sum(map(len, expected)) == N // ranks - len(gone)
    trained: list[list[int]] = []
    state = begin().state_dict()
    for stop in (*stops, None):
        pruner = begin()
        pruner.load_state_dict(state)
        trained += list(batches_of(pruner, stop))
        state = pruner.state_dict()
    assert trained == expected


def test_the_last_step_of_an_epoch_is_due_although_a_sample_was_left_out():
    pruner = fp.Pruner(data(), fp.FullData(2), batch_size=BATCH, accumulation=5)
    _, collate = unreadable([2], pruner)
    loader = DataLoader(pruner.dataset, BATCH, sampler=pruner.sampler, collate_fn=collate)
    due = 0
    for _ in pruner.epochs():
        for index, _ in loader:
            pruner.record(index, torch.ones(len(index)))
            due += pruner.step_is_due
    assert due == pruner.steps_done == pruner.total_steps() == 6


def test_samples_that_never_reach_a_batch_do_not_end_the_rotation_of_short_epochs():
    epochs, left_out = 20, 5
    pruner = new(fp.Adaptive(epochs, save=0.5, rates=[1.0] * epochs))
    visits = np.zeros(N, dtype=np.int64)
    for _ in pruner.epochs():
        for index in pruner.sampler.order().split(BATCH):
            readable = index[index >= left_out]
            pruner.record(readable, torch.ones(len(readable)))
            visits[readable] += 1
    assert np.ptp(visits[left_out:]) <= 1


# --- small things --------------------------------------------------------------------------------


def test_lengths_and_epochs_may_be_other_numbers():
    pruner = fp.Pruner(np.int64(N), fp.Adaptive(3.0, rates=[1, 1, 1]), batch_size=BATCH)
    assert (pruner.num_samples, pruner.policy.epochs) == (N, 3)
    with pytest.raises(InputError, match=r"epochs to be a whole number of at least 1, got 3\.5"):
        fp.Adaptive(3.5)


def test_less_than_one_batch_per_rank_is_refused_where_it_matters():
    with pytest.raises(InputError, match="expected at least one step of 100 samples"):
        new(batch_size=100, drop_last=True)
    assert new(POLICIES["full"](), batch_size=100, drop_last=True).total_steps() == 0


@pytest.mark.parametrize("logits", [False, True])
def test_a_batch_inside_of_torch_func_is_refused(logits):
    pruner = fp.Pruner(4, fp.FullData(1), batch_size=4)
    index = torch.arange(4)

    def loss(values):
        more = (values[:, None].expand(4, 2), index % 2) if logits else ()
        return pruner.record(index, values, *more)

    with pytest.raises(InputError, match=r"outside the transforms of torch\.func"):
        torch.func.grad(loss)(torch.ones(4))
