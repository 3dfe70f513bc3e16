"""A loop with Accelerate: it equals a plain loop, and its checkpoints resume at any step."""

import os
import re
import runpy
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from digits_loop import digits, network, weights
from gloo_group import free_port, launched, leave_group
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader

import fineprune as fp

pytest.importorskip("accelerate")

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "accelerate_loop.py"
PAGE = ROOT / "docs" / "adopt" / "accelerate.md"
# The learning rate falls to 0, so the last epochs are the shortest ones.
STEPS = [20, 20, 20, 20, 20, 10, 1, 1]


pytestmark = pytest.mark.usefixtures("one_thread_everywhere")


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))["main"]


def chosen(pruner):
    """The samples that ``Adaptive`` has chosen in its round, as bits."""
    return pruner.policy.state_dict()["chosen"]


@pytest.fixture(scope="module")
def whole(example):
    return example()


def plain_loop():
    """Train the same without Accelerate."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pruner = fp.Pruner(digits(), fp.Adaptive(8, save=0.3), batch_size=16, accumulation=2)
    loader = DataLoader(pruner.dataset, batch_size=16, sampler=pruner.sampler)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, pruner.total_steps())
    pruner.set_rates(scheduler, by="steps")
    steps = []
    for _ in pruner.epochs():
        steps.append(len(loader) // 2)
        for number, (index, (inputs, targets)) in enumerate(loader):
            losses = F.cross_entropy(model(inputs), targets, reduction="none")
            (pruner.record(index, losses) / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
    return model, pruner, steps


def test_it_trains_as_a_plain_loop_does(whole):
    model, pruner, steps = plain_loop()
    assert steps == STEPS
    assert whole[2] == sum(STEPS) == pruner.total_steps()
    assert torch.equal(chosen(whole[1]), chosen(pruner))
    assert torch.equal(weights(whole[0]), weights(model))


# Inside a full epoch and a shortened one, and after the last steps of both.
@pytest.mark.parametrize("step", [1, 25, 40, 104, 110])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_resumed_loop_equals_the_undisturbed_one(dropout, step, example, tmp_path):
    whole = example(dropout=dropout)
    example(save_to=tmp_path, save_at=step, dropout=dropout)
    model, pruner, steps = example(resume_from=tmp_path, dropout=dropout)
    assert steps == sum(STEPS) - step
    assert torch.equal(chosen(pruner), chosen(whole[1]))
    assert torch.equal(weights(model), weights(whole[0]))


def test_without_a_generator_of_its_own_the_loader_changes_dropout_after_a_resume(tmp_path):
    """The iterator of a loader draws a number from the generator from which dropout draws, too."""
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    without = [line for line in lines if "generator=torch.Generator()" not in line]
    assert len(without) == len(lines) - 1
    names: dict[str, Any] = {"__name__": "example"}
    exec("\n".join(without), names)
    names["main"](save_to=tmp_path, save_at=25, dropout=0.3)
    whole, resumed = (names["main"](resume_from=one, dropout=0.3) for one in (None, tmp_path))
    assert not torch.equal(weights(resumed[0]), weights(whole[0]))
    assert resumed[2] == whole[2] - 25


def train_rank(rank, folder, port):
    torch.set_num_threads(1)
    os.environ |= {**launched(rank, port), "ACCELERATE_USE_CPU": "true"}
    main = runpy.run_path(str(EXAMPLE))["main"]
    told = []
    main(save_to=Path(folder, "checkpoint"), save_at=14)
    for resume_from in (None, Path(folder, "checkpoint")):
        model, pruner, steps = main(resume_from=resume_from)
        told.append({"weights": weights(model), "chosen": chosen(pruner), "steps": steps})
    torch.save(told, f"{folder}/rank{rank}.pt")
    leave_group()


def test_two_processes_train_every_kept_sample_and_resume(fast_spawn, tmp_path):
    spawn(train_rank, (str(tmp_path), free_port()), nprocs=2)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    for whole, resumed in ranks:
        assert whole["steps"] == round(0.7 * 8 * 10)  # Steps of 64 samples.
        assert resumed["steps"] == whole["steps"] - 14
        assert torch.equal(whole["chosen"], ranks[0][0]["chosen"])
        assert torch.equal(whole["chosen"], resumed["chosen"])
        assert torch.equal(whole["weights"], resumed["weights"])
    one = one_process_with_the_doubled_batch()
    assert torch.equal(ranks[0][0]["chosen"], chosen(one))


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7),
    reason="with torch 2.6, one in some ten processes of a group aborts after its last line",
)
def test_the_command_of_the_example_and_of_its_page_trains_on_two_processes(python, python_file):
    one, several = re.findall(r"^    (.+)$", runpy.run_path(str(EXAMPLE))["__doc__"], re.MULTILINE)
    assert one == "python examples/accelerate_loop.py"
    assert f"\n```\n{several}\n```\n" in PAGE.read_text(encoding="utf-8")
    variable, launcher, *arguments = shlex.split(several)
    assert launcher == "torchrun"
    done = subprocess.run(
        [*python, "-m", "torch.distributed.run", *arguments],
        env={
            **os.environ,
            **dict([variable.split("=")]),
            "PYTHON_EXEC": python_file,
            "PET_STANDALONE": "1",  # A store of this run alone, on a port that is free.
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, *epochs = done.stdout.splitlines()
    assert first == "processes that train together: 2"
    assert len(epochs) == len(STEPS)  # Of one process.


def one_process_with_the_doubled_batch():
    names = runpy.run_path(str(EXAMPLE))
    names["main"].__globals__["BATCH"] = 32
    return names["main"]()[1]
