"""What a ``LabelWatch`` costs: its records, its suspects and its memory."""

import io

import torch

import fineprune as fp

SAMPLES, BATCH = 50_000, 128


class Watch:
    """One epoch of records, and the suspects after it."""

    params = (10, 100, 1000)
    param_names = ("classes",)
    number, repeat = 1, (3, 10, 10.0)

    def setup(self, classes: int) -> None:
        chance = torch.Generator().manual_seed(0)
        self.watch = fp.LabelWatch(SAMPLES, classes)
        self.order = torch.randperm(SAMPLES, generator=chance).split(BATCH)
        self.logits = torch.randn(BATCH, classes, generator=chance)
        self.labels = torch.randint(classes, (BATCH,), generator=chance)
        self.record()

    def record(self) -> None:
        for index in self.order:
            self.watch.record(index, self.logits[: len(index)], self.labels[: len(index)])

    def time_record(self, classes: int) -> None:
        self.record()

    def time_suspects(self, classes: int) -> None:
        self.watch.suspects()

    def track_bytes_per_sample(self, classes: int) -> float:
        saved = io.BytesIO()
        torch.save(self.watch.state_dict(), saved)
        return saved.tell() / SAMPLES
