"""FSDP2 and ``torch.compile``: a loop with them equals the loop without them."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits_loop import digits, network, weights
from gloo_group import gloo_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader

import fineprune as fp
from fineprune.errors import InputError

EXAMPLES = Path(__file__).parents[1] / "examples"
# Two processes with batches of 16. The learning rate falls to 0, and so do the epochs' lengths.
STEPS = [20, 20, 20, 20, 20, 10, 1, 1]


def made_pruner(epochs=8, batch_size=16):
    schedule = fp.Schedule(epochs, window=4, start=1, block=2, count=1)
    return fp.Pruner(digits(), fp.FinePruning(schedule, prune=0.3), batch_size=batch_size)


# -- FSDP2 ----------------------------------------------------------------------------------------


def train_rank(rank, folder):
    torch.set_num_threads(1)
    with gloo_group(rank, folder):
        main = runpy.run_path(str(EXAMPLES / "fsdp2.py"))["main"]
        inside = Path(folder, "checkpoint")
        told = {"whole": told_of(*main())}
        main(save_to=inside, save_at=27)
        told["resumed"] = told_of(*main(resume_from=inside))
        train_with_ddp = runpy.run_path(str(EXAMPLES / "ddp.py"))["main"]
        after = Path(folder, "ddp.pt")
        told["ddp"] = told_of(*train_with_ddp())
        with pytest.MonkeyPatch.context() as patch:
            stop_after(patch, 3)
            with pytest.raises(KeyboardInterrupt):
                train_with_ddp(after)
        dist.barrier()  # The file is there.
        told["ddp resumed"] = told_of(*train_with_ddp(after))
        torch.save(told, f"{folder}/rank{rank}.pt")


def stop_after(patch, epochs):
    """Let the loop over the epochs be interrupted after so many of them."""
    end_epoch = fp.Pruner.end_epoch

    def interrupted(pruner):
        end_epoch(pruner)
        if pruner.position.epoch == epochs:
            raise KeyboardInterrupt

    patch.setattr(fp.Pruner, "end_epoch", interrupted)


def told_of(model, pruner, steps):
    counts = pruner.counts
    if counts is None:
        counts = pruner.policy.state_dict()["chosen"]
    return {"weights": weights(model), "counts": counts, "steps": steps}


@pytest.fixture(scope="module")
def ranks(fast_spawn, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    spawn(train_rank, (str(folder),), nprocs=2)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def assert_equal(one, other):
    assert torch.equal(one["counts"], other["counts"])
    assert torch.equal(one["weights"], other["weights"])


def test_fsdp2_trains_as_ddp_does(ranks):
    for told in ranks:
        assert told["whole"]["steps"] == told["ddp"]["steps"] == sum(STEPS)
        assert_equal(told["whole"], told["ddp"])
    assert_equal(ranks[0]["whole"], ranks[1]["whole"])
    assert ranks[0]["whole"]["counts"].sum() > 0


def test_ddp_continues_where_it_was_stopped(ranks):
    for told in ranks:
        assert told["ddp resumed"]["steps"] == sum(STEPS[3:])
        assert_equal(told["ddp resumed"], told["ddp"])


def test_fsdp2_resumes_from_a_distributed_checkpoint_inside_an_epoch(ranks):
    for told in ranks:
        assert told["resumed"]["steps"] == sum(STEPS) - 27  # Step 27 is inside an epoch.
        assert_equal(told["resumed"], told["whole"])


# -- torch.compile --------------------------------------------------------------------------------


def train_compiled(how):
    """Train two pruned and two full epochs with a step that is compiled in some way.

    The compiler's front end, which decides what is compiled, is the part that matters here. The
    code that it generates by default needs a C++ compiler, so the graphs are run as they are.
    """
    torch.compiler.reset()
    model, pruner = network(), made_pruner(4, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(pruner.dataset, batch_size=32, sampler=pruner.sampler)

    def losses_of(inputs, targets):
        return F.cross_entropy(model(inputs), targets, reduction="none")

    def mean_and_losses(inputs, targets):
        losses = losses_of(inputs, targets)
        return losses.mean(), losses

    def recorded(index, inputs, targets):
        return pruner.record(index, losses_of(inputs, targets))

    def whole_step(index, inputs, targets):
        optimizer.zero_grad()
        recorded(index, inputs, targets).backward()
        optimizer.step()

    compiled: Any
    if how == "one graph":
        compiled = torch.compile(recorded, backend="aot_eager", fullgraph=True)
        index, (inputs, targets) = next(iter(loader))
        return compiled(index, inputs, targets)
    compiled = {
        "losses": lambda: torch.compile(losses_of, backend="aot_eager", fullgraph=True),
        "mean and losses": lambda: torch.compile(
            mean_and_losses, backend="aot_eager", fullgraph=True
        ),
        "whole step": lambda: torch.compile(whole_step, backend="aot_eager"),
        "nothing": lambda: losses_of,
    }[how]()
    for _ in pruner.epochs():
        for index, (inputs, targets) in loader:
            if how == "whole step":
                compiled(index, inputs, targets)
                continue
            optimizer.zero_grad()
            if how == "mean and losses":
                loss, losses = compiled(inputs, targets)
                pruner.record(index, losses)
            else:
                loss = pruner.record(index, compiled(inputs, targets))
            loss.backward()
            optimizer.step()
    return told_of(model, pruner, 0)


def test_losses_that_every_rank_has_as_a_whole_may_be_distributed_tensors(tmp_path):
    def distributed(tensor, placement):
        return DTensor.from_local(tensor, mesh, [placement])

    with gloo_group(0, tmp_path, size=1):
        mesh = init_device_mesh("cpu", (1,))
        policy = fp.Adaptive(2, 0.1, rates=[0.1, 0.1])
        plain, pruner = (fp.Pruner(16, policy, batch_size=8) for _ in range(2))
        labels = torch.zeros(8, dtype=torch.int64)
        for _, _ in zip(plain.epochs(), pruner.epochs(), strict=True):
            for index in pruner.sampler.order().split(8):
                losses, logits = torch.rand(8), torch.randn(8, 3)
                plain.record(index, losses, logits, labels)
                whole = [distributed(part, Replicate()) for part in (losses, logits, labels)]
                pruner.record(index, *whole)
        assert plain.watch is not None
        assert pruner.watch is not None
        assert torch.equal(pruner.watch.ranking().scores, plain.watch.ranking().scores)
        pruner = fp.Pruner(16, policy, batch_size=8)
        with pytest.raises(
            InputError, match=r"got a DTensor .* give record losses.full_tensor\(\)"
        ):
            pruner.record(torch.arange(8), distributed(torch.rand(8), Shard(0)))


@pytest.fixture(scope="module")
def eager():
    return train_compiled("nothing")


# torch itself gives warnings where a graph ends.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("how", ["losses", "mean and losses", "whole step"])
def test_a_compiled_step_counts_as_an_eager_one(how, eager):
    compiled = train_compiled(how)
    assert eager["counts"].sum() > 0
    assert torch.equal(compiled["counts"], eager["counts"])
    torch.testing.assert_close(compiled["weights"], eager["weights"])


def test_one_graph_with_the_bookkeeping_is_refused():
    """The bookkeeping runs between graphs, and a step that allows none must leave it outside."""
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\.compiler\.disable"):
        train_compiled("one graph")
