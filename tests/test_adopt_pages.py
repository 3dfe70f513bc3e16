"""The pages about frameworks: their code is that of the examples, and trains as a reader pastes it.

Each page has one block of code with everything that the pruning needs, from the optimizer to the
loop. The reader has the imports of the framework, the data and the network.
"""

import importlib
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits_loop import digits, network
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, default_collate

import fineprune as fp

ROOT = Path(__file__).parents[1]
EPOCHS, BATCH = 8, 32

pytestmark = pytest.mark.usefixtures("one_thread_everywhere")


def blocks(page):
    text = (ROOT / f"docs/adopt/{page}.md").read_text(encoding="utf-8")
    return re.findall(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def of_a_loop(folder):
    """What a reader with a loop of their own has."""
    return {
        "torch": torch,
        "F": F,
        "DataLoader": DataLoader,
        "default_collate": default_collate,
        "train_set": digits(),
        "model": network(),
        "device": "cpu",
        "EPOCHS": EPOCHS,
        "BATCH": BATCH,
    }


def of_ddp(folder):
    parallel = importlib.import_module("torch.nn.parallel").DistributedDataParallel
    return {**of_a_loop(folder), "network": network(), "DistributedDataParallel": parallel}


def of_fsdp2(folder):
    made = importlib.import_module("torch.distributed.device_mesh").init_device_mesh
    shard = importlib.import_module("torch.distributed.fsdp").fully_shard
    return {**of_a_loop(folder), "dist": dist, "init_device_mesh": made, "fully_shard": shard}


def of_accelerate(folder):
    made = pytest.importorskip("accelerate", reason="accelerate is not installed").Accelerator
    return {**of_a_loop(folder), "Accelerator": made, "BATCH": BATCH // 2, "ACCUMULATION": 2}


def of_streams(folder):
    example = runpy.run_path(str(ROOT / "examples/stream_shards.py"))
    data = load_digits()
    shards = example["write_shards"](folder, data.data[:640], data.target[:640])
    functions = {name: example[name] for name in ("keys", "read", "decode")}
    return {**of_a_loop(folder), **functions, "shards": shards, "SEED": 0}


def of_lightning(folder):
    pytest.importorskip("lightning", reason="lightning is not installed")
    pl = importlib.import_module("lightning.pytorch")
    loader = DataLoader(digits(), batch_size=BATCH, shuffle=True)
    own = {"pl": pl, "Any": Any, "network": network(), "train_loader": loader}
    return {
        **of_a_loop(folder),
        **own,
        "test_loader": DataLoader(digits(), batch_size=BATCH),
        "checkpoint": None,
    }


def of_trainer(folder):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    data = load_digits()
    pixels = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, num_channels=1, hidden_size=8, num_hidden_layers=1,
        num_attention_heads=1, intermediate_size=8, num_labels=10,
    )  # fmt: skip
    return {
        "TrainingArguments": transformers.TrainingArguments,
        "output_dir": str(folder),
        "EPOCHS": EPOCHS,
        "model": transformers.ViTForImageClassification(config),
        "train_set": [
            {"pixel_values": image, "labels": int(label)}
            for image, label in zip(pixels[:640], data.target[:640], strict=True)
        ],
    }


def of_trl(folder):
    trl = pytest.importorskip("trl", reason="trl is not installed")
    example = runpy.run_path(str(ROOT / "examples/trl_sft.py"))
    tokens = example["tokenizer"]()
    return {
        "SFTConfig": trl.SFTConfig,
        "SFTTrainer": trl.SFTTrainer,
        "output_dir": str(folder),
        "EPOCHS": 3,
        "model": example["network"](tokens, 8),
        "train_set": example["sums"](320),
        "tokens": tokens,
    }


# The example of a page, and what its reader has.
PAGES = {
    "ddp": ("ddp", of_ddp),
    "fsdp2": ("fsdp2", of_fsdp2),
    "accelerate": ("accelerate_loop", of_accelerate),
    "streams": ("stream_shards", of_streams),
    "lightning": ("lightning_trainer", of_lightning),
    "trainer": ("trainer_image", of_trainer),
    "trl": ("trl_sft", of_trl),
}


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_is_an_excerpt_of_its_example(page):
    example, _ = PAGES[page]
    left = iter((ROOT / f"examples/{example}.py").read_text(encoding="utf-8").splitlines())
    (block,) = blocks(page)
    lines = [line.strip() for line in left]
    found = [lines.index(line.strip()) for line in block.splitlines() if line.strip()]
    # Lines that occur twice in the example, such as brackets, may be found too early.
    unique = [place for place in found if lines.count(lines[place]) == 1]
    assert unique == sorted(unique)


@pytest.fixture
def process_group(tmp_path):
    yield lambda: dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    if dist.is_initialized():
        dist.destroy_process_group()


def ignores_warnings_of_frameworks(test):
    for ignored in (
        ":FutureWarning",  # Of TRL and transformers.
        ":DeprecationWarning",
        ".*does not have many workers",
        ".*Starting from v1.9.0, `tensorboardX`",
        "The number of training batches",
        "The `srun` command is available",
        ".*validation data, you should set `shuffle=False`",
        ".*'pin_memory' argument is set as true",
    ):
        test = pytest.mark.filterwarnings(f"ignore:{ignored}")(test)
    return test


@pytest.mark.parametrize("page", PAGES)
@ignores_warnings_of_frameworks
def test_the_code_of_a_page_trains_as_it_is_pasted(page, process_group, tmp_path, monkeypatch):
    """The learning rate falls, the policy knows it, and the number of steps is the planned one."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.chdir(tmp_path)  # Lightning writes its logs there.
    if page in ("ddp", "fsdp2"):
        process_group()
    names: dict[str, Any] = {"__name__": "pasted", **PAGES[page][1](tmp_path)}
    (block,) = blocks(page)
    exec(compile(block, f"docs/adopt/{page}.md", "exec"), names)

    trainer = names.get("trainer")
    if page == "lightning":
        (pruner,) = (one.pruner for one in trainer.callbacks if hasattr(one, "pruner"))
        scheduler = trainer.lr_scheduler_configs[0].scheduler
    elif trainer is not None:
        pruner, scheduler = trainer.pruner, trainer.lr_scheduler
    else:
        pruner, scheduler = names["pruner"], names["scheduler"]
    full = pruner.policy.epochs * -(-pruner.num_samples // pruner.shape.multiple)
    assert pruner.steps_done == pruner.total_steps() < 0.75 * full
    assert scheduler.last_epoch == pruner.total_steps()
    assert scheduler.get_last_lr()[0] < 0.1 * max(scheduler.base_lrs)
    rates = pruner.policy.rates
    assert rates[-1] < 0.5 < rates[0]


@pytest.mark.parametrize("page", ["lightning", "trainer"])
@ignores_warnings_of_frameworks
def test_the_code_that_watches_labels_shows_all_suspects(page, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "pasted", **PAGES[page][1](tmp_path)}
    labels = load_digits().target[:640]
    labels[:40] = (labels[:40] + 1) % 10
    if page == "trainer":
        for item, label in zip(names["train_set"], labels, strict=True):
            item["labels"] = int(label)
    else:
        names["train_set"].tensors[1][:] = torch.tensor(labels)
    text = (ROOT / f"docs/adopt/{page}.md").read_text(encoding="utf-8")
    (watched,) = re.findall(r"^```py title=.*?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for block in (*blocks(page), watched):
        exec(compile(block, f"docs/adopt/{page}.md", "exec"), names)
    watch = names["watch"]
    assert watch.ranking().labels.tolist() == labels.tolist()
    cards = (tmp_path / "audit.html").read_text(encoding="utf-8").count('<li class="card"')
    assert cards == watch.ranking().num_suspects >= 20


def test_the_code_for_other_packages_is_that_of_the_tests():
    text = (ROOT / "docs/adopt/streams.md").read_text(encoding="utf-8")
    tests = [ROOT / "tests" / name for name in ("test_streams.py", "made_streams.py")]
    lines = {line.strip() for file in tests for line in file.read_text("utf-8").splitlines()}
    found = re.findall(r"^```py title=.*?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(found) == 2
    for block in found:
        assert not [line for line in block.splitlines() if line.strip() not in lines]


# -- counters of steps -----------------------------------------------------------------------------


def test_the_length_of_the_loader_is_no_counter_of_steps_but_the_pruner_has_one():
    schedule = fp.Schedule(6, window=3, start=1)
    pruner = fp.Pruner(digits(), fp.RandomPruning(schedule, prune=0.3), batch_size=BATCH)
    loader, products, counted = pruner.loader(), [], []
    for epoch in pruner.epochs():
        for number, (index, _) in enumerate(loader):
            products.append(epoch * len(loader) + number)
            counted.append(pruner.steps_done)
            pruner.record(index, torch.zeros(len(index)))
    assert products != sorted(products)
    assert counted == list(range(pruner.total_steps()))


# -- other trainers: a block of code each ----------------------------------------------------------

OTHERS = {
    "fastai": "fastai",
    "ignite": "ignite",
    "monai": "monai",
    "mmengine": "mmengine",
    "skorch": "skorch",
    "keras": "keras",
    "fabric": "lightning",
}


def of_another_trainer():
    """What a reader has, with a scheduler that is stepped once per epoch."""
    made = of_a_loop(None)
    optimizer = torch.optim.SGD(made["model"].parameters(), lr=0.1, momentum=0.9)
    return {
        **made,
        "fp": fp,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [6, 9], gamma=0.2),
        "rates": [0.1] * 6 + [0.02] * 2,
        "valid_set": digits(),
        "valid_loader": DataLoader(digits(), batch_size=BATCH),
        "CLASSES": 10,
    }


def in_a_plain_loop():
    """The weights and the pruner after the same training without a framework."""
    of = of_another_trainer()
    policy = fp.Adaptive(EPOCHS, save=0.35, rates=of["scheduler"])
    pruner = fp.Pruner(of["train_set"], policy, batch_size=BATCH)
    for _ in pruner.epochs():
        for index, (x, y) in pruner.loader():
            logits = of["model"](x)
            losses = F.cross_entropy(logits, y, reduction="none")
            pruner.record(index, losses, logits, y).backward()
            of["optimizer"].step()
            of["optimizer"].zero_grad()
        of["scheduler"].step()
    return of["model"].state_dict(), pruner


def in_a_plain_loop_of_one_cycle():
    """The same with the rates and momenta of fastai, which change in each step."""
    cosine = importlib.import_module("fastai.callback.schedule").combined_cos
    rate, momentum = cosine(0.25, 0.1 / 25, 0.1, 0.1 / 1e5), cosine(0.25, 0.95, 0.85, 0.95)
    of = of_another_trainer()
    policy = fp.Adaptive(EPOCHS, save=0.35, rates=lambda progress: rate(progress / EPOCHS))
    pruner = fp.Pruner(of["train_set"], policy, batch_size=BATCH)
    for epoch in pruner.epochs():
        done = epoch / EPOCHS
        for index, (x, y) in pruner.loader():
            of["optimizer"].param_groups[0].update(lr=rate(done), momentum=momentum(done))
            logits = of["model"](x)
            pruner.record(index, F.cross_entropy(logits, y, reduction="none"), logits, y)
            F.cross_entropy(logits, y).backward()
            of["optimizer"].step()
            of["optimizer"].zero_grad()
            done += 1 / (pruner.batches(epoch) * EPOCHS)
    return of["model"].state_dict(), pruner


@pytest.mark.parametrize("name", OTHERS)
@ignores_warnings_of_frameworks
def test_the_code_for_another_trainer_takes_the_steps_of_a_plain_loop(name, tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.chdir(tmp_path)
    pytest.importorskip(OTHERS[name], reason=f"{OTHERS[name]} is not installed")
    text = (ROOT / "docs/adopt/others.md").read_text(encoding="utf-8")
    found = dict(re.findall(r'^```py title="(\w+)"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL))
    assert found.keys() == OTHERS.keys()
    names = of_another_trainer()
    exec(compile(found[name], "docs/adopt/others.md", "exec"), names)

    loop = in_a_plain_loop_of_one_cycle if name == "fastai" else in_a_plain_loop
    weights, plain = loop()
    assert names["pruner"].steps_done == plain.steps_done == plain.total_steps()
    assert names["pruner"].position == plain.position
    if name == "keras":  # It has other weights and an optimizer of its own.
        x, y = digits().tensors
        assert (names["network"](x).argmax(1) == y).float().mean() > 0.9
        return
    trained = names["net"].module_ if name == "skorch" else names["model"]
    for key, expected in weights.items():
        assert torch.equal(trained.state_dict()[key], expected)
    assert torch.equal(names["pruner"].sampler.order(), plain.sampler.order())
