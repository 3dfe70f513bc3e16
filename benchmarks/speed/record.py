"""What recording costs, beside what a loop without it does."""

import torch

import fineprune as fp

SAMPLES, BATCH, CLASSES = 50_048, 128, 10


class Record:
    """One epoch of 391 batches: the means of the losses alone, with ``record``, and with logits."""

    params = ("mean", "record", "record with logits")
    param_names = ("what",)
    number, repeat = 1, (5, 20, 10.0)

    def setup(self, what: str) -> None:
        self.pruner = fp.Pruner(SAMPLES, fp.FullData(2), batch_size=BATCH)
        self.epochs = iter(self.pruner.epochs())
        next(self.epochs)
        self.order = self.pruner.sampler.order().split(BATCH)
        self.losses = torch.rand(BATCH, requires_grad=True) * 2
        self.logits, self.labels = torch.randn(BATCH, CLASSES), torch.arange(BATCH) % CLASSES

    def time_epoch(self, what: str) -> None:
        watched = (self.logits, self.labels) if what == "record with logits" else ()
        for index in self.order:
            if what == "mean":
                self.losses.mean()
            else:
                self.pruner.record(index, self.losses, *watched)
