"""Trainings of a small network in Lightning, and the same in a plain loop.

The tests import this file when they run, because importing Lightning takes seconds.
"""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from gloo_group import free_port, launched, leave_group
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.multiprocessing.spawn import start_processes
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fineprune as fp
from fineprune.datasets.synthetic import make_synthetic
from fineprune.errors import InputError
from fineprune.integrations.lightning import DataPruning, record

EPOCHS, BATCH, LABELS = 6, 16, 4
# What FinePruning and Adaptive learn.
PER_SAMPLE = ("counts", "chosen", "scores")


def make_data():
    train, _ = make_synthetic(200, size=4, classes=LABELS)
    return TensorDataset(train.images.flatten(1).float() / 255, train.labels)


DATA = make_data()
POLICY = fp.FinePruning(fp.Schedule(EPOCHS, window=3, start=1), prune=0.3)
# Each epoch trains 200 or 144 samples.
BATCHES = [9, 9, 13, 9, 9, 13]


def new_network(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, LABELS))


class Net(pl.LightningModule):
    """Its training step differs from a usual one by the call of ``record`` only.

    Attributes:
        lengths: The number of batches that Lightning announced at the start of each epoch.
        validations: Number of validations after training batches.
    """

    def __init__(self, dropout=0.0, steps=None):
        super().__init__()
        self.network = new_network(dropout)
        self.steps = steps
        self.lengths = []
        self.validations = 0

    def training_step(self, batch, batch_idx):
        x, y = batch
        return record(self, F.cross_entropy(self.network(x), y, reduction="none"))

    def validation_step(self, batch, batch_idx):
        return self.training_step(batch, batch_idx)

    def on_train_epoch_start(self):
        self.lengths.append(self.trainer.num_training_batches)

    def on_validation_epoch_end(self):
        self.validations += not self.trainer.sanity_checking

    def configure_optimizers(self):
        if self.steps is None:
            self.steps = self.trainer.estimated_stepping_batches
        optimizer, scheduler = optimization(self.network, self.steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class WatchedNet(Net):
    """Its training step records the logits and labels, too."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.network(x)
        return record(self, F.cross_entropy(logits, y, reduction="none"), logits, y)


class Returning(Net):
    """Its training step returns what a watch records. Its training batches contain the indices."""

    def training_step(self, batch, batch_idx):
        index, (x, y) = batch
        logits = self.network(x)
        return {"loss": F.cross_entropy(logits, y), "index": index, "logits": logits, "labels": y}

    def validation_step(self, batch, batch_idx):
        pass


class Scheduled(Net):
    """Its learning rate falls to a tenth at a third and two thirds of the training.

    Args:
        options: When Lightning steps the scheduler; None for no such scheduler.
        plateau: Whether the scheduler waits for the loss instead.
    """

    def __init__(self, options, plateau=False):
        super().__init__()
        self.options = options
        self.plateau = plateau

    def validation_step(self, batch, batch_idx):
        self.log("loss", super().validation_step(batch, batch_idx))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.plateau:
            waiting = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return [optimizer], [{"scheduler": waiting, "monitor": "loss"}]
        if self.options is None:
            return optimizer
        per_epoch = self.options["interval"] == "epoch"
        total = 3 if per_epoch else self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda number: 0.1 ** (3 * number // total)
        )
        return [optimizer], [{"scheduler": scheduler, **self.options}]


class Fetching(pl.LightningModule):
    """Its training step fetches the batches itself."""

    def training_step(self, dataloader_iter):
        raise NotImplementedError


class Data(pl.LightningDataModule):
    """The data of these trainings."""

    def train_dataloader(self):
        return loader()

    def val_dataloader(self):
        return DataLoader(DATA, batch_size=100)


class ValidateElsewhere(pl.Callback):
    """Validates with another ``Trainer`` at the end of each epoch.

    Args:
        of: What this ``Trainer`` is given in place of the module.
    """

    def __init__(self, of):
        self.of = of

    def on_train_epoch_end(self, runner, module):
        trainer().validate(self.of(module), DataLoader(DATA, batch_size=100), verbose=False)
        module.train()


def optimization(network, steps):
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps)
    return optimizer, scheduler


def loader(**options):
    return DataLoader(DATA, **{"batch_size": BATCH, "shuffle": True, **options})


def ordered_loader(data=DATA, **options):
    """A loader whose order Lightning alone keeps: that of ``DistributedSampler`` with a seed."""
    sampler: DistributedSampler[Any] = DistributedSampler(data, 1, 0, seed=3)
    return DataLoader(data, batch_size=BATCH, sampler=sampler, **options)


def trainer(*callbacks, **options):
    quiet = {
        "max_epochs": EPOCHS,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(one, ModelCheckpoint) for one in callbacks),
    }
    return pl.Trainer(callbacks=list(callbacks), **{**quiet, **options})


def fit(*callbacks, net=None, data=None, ckpt_path=None, seed=1, **options):
    """Train, and return the module, whose ``trainer`` says the rest."""
    net = Net() if net is None else net
    runner = trainer(*callbacks, **options)
    torch.manual_seed(seed)
    runner.fit(
        net,
        loader() if data is None else data,
        DataLoader(DATA, batch_size=100),
        ckpt_path=ckpt_path,
    )
    return net


def pruner_of(net):
    (pruning,) = (one for one in net.trainer.callbacks if isinstance(one, DataPruning))
    return pruning.pruner


def plain_loop(policy, steps=None, accumulation=1, gives_rates=False):
    """Train without Lightning; return the network, the pruner and the number of steps."""
    network = new_network()
    pruner = fp.Pruner(DATA, policy, batch_size=BATCH, accumulation=accumulation)
    optimizer, scheduler = optimization(network, steps or pruner.total_steps())
    if gives_rates:
        pruner.set_rates(scheduler, by="steps")
    batches = DataLoader(pruner.dataset, batch_size=BATCH, sampler=pruner.sampler)
    taken = 0
    for _ in pruner.epochs():
        for number, (index, (x, y)) in enumerate(batches, start=1):
            losses = F.cross_entropy(network(x), y, reduction="none")
            (pruner.record(index, losses) / accumulation).backward()
            if number % accumulation == 0 or number == len(batches):
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                taken += 1
    return network, pruner, taken


def equal_weights(one, other):
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def every_step(folder):
    """A callback that saves a checkpoint after each step of the optimizer."""
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


def every_epoch(folder):
    """A callback that saves a checkpoint at the end of each epoch."""
    return ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)


class Stop(pl.Callback):
    """Raises an exception in a hook of a batch."""

    def __init__(self, hook, batch):
        self.batch = batch
        setattr(self, hook, self.stop)

    def stop(self, trainer, *_):
        if trainer.fit_loop.total_batch_idx == self.batch:
            raise InterruptedError


def stopped_checkpoint(folder, hook, batch):
    """Train until an exception in a hook of a batch, and return the checkpoint of that moment."""
    saving = ModelCheckpoint(folder, filename="{step}", save_on_exception=True, save_top_k=0)
    try:
        fit(Stop(hook, batch), DataPruning(POLICY), saving)
    except InterruptedError:
        (file,) = Path(folder).glob("*.ckpt")
        return file
    raise AssertionError("the training was not stopped")


def recording(change):
    """Return a module whose training step calls ``change(module, usual step, batch)``."""

    class Changed(Net):
        def training_step(self, batch, batch_idx):
            return change(self, super().training_step, batch)

        def validation_step(self, batch, batch_idx):
            pass

    return Changed(steps=100)


# -- two ranks ------------------------------------------------------------------------------------


def on_two_ranks(folder):
    """Train with two ranks, as torchrun starts them, and return what each of them found."""
    # A fork needs not import Lightning again.
    start_processes(_rank_main, (str(folder), free_port()), nprocs=2, start_method="fork")
    return [torch.load(f"{folder}/rank{rank}.pt") for rank in range(2)]


def _rank_main(rank, folder, port):
    os.environ.update(launched(rank, port))
    torch.set_num_threads(1)
    ranks = {"strategy": "ddp", "devices": 2, "data": loader(batch_size=BATCH // 2)}
    alone = fit(**ranks)
    unpruned = fit(DataPruning(fp.FullData(EPOCHS)), **ranks)
    pruned = fit(DataPruning(POLICY), every_step(folder), **ranks)
    resumed = {}
    for step in (12, 18):  # Within the second epoch, and after its last batch.
        net = fit(DataPruning(POLICY), ckpt_path=f"{folder}/step={step}.ckpt", **ranks)
        same = equal_weights(net, pruned)
        resumed[step] = same and torch.equal(pruner_of(net).counts, pruner_of(pruned).counts)
    # Lightning leaves the sampler to the loader: without one, each rank has a data set of its own.
    ranks["use_distributed_sampler"] = False
    refused = ""
    try:
        fit(DataPruning(POLICY), **ranks)
    except InputError as error:
        refused = str(error)
    sampler: DistributedSampler[Any] = DistributedSampler(DATA, seed=0)
    ranks["data"] = loader(batch_size=BATCH // 2, shuffle=False, sampler=sampler)
    sampled = fit(DataPruning(POLICY), **ranks)
    found = {
        "unpruned": equal_weights(alone, unpruned),
        "weights": pruned.network.state_dict(),
        "counts": pruner_of(pruned).counts,
        "steps": (pruned.steps, pruned.trainer.global_step),
        "lengths": pruned.lengths,
        "resumed": resumed,
        "refused": refused,
        "sampled": equal_weights(sampled, pruned),
    }
    torch.save(found, f"{folder}/rank{rank}.pt")
    leave_group()
