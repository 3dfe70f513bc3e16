"""What is done between two epochs: reducing the records, counting, and choosing the samples."""

import torch

import fineprune as fp


class BetweenEpochs:
    """The end of an epoch and the selection and order of the next one, for each policy."""

    params = (("full", "fine-pruning", "infobatch", "adaptive"), (50_000, 1_280_000))
    param_names = ("policy", "samples")
    number, repeat = 1, (3, 10, 20.0)
    timeout = 300

    def setup(self, policy: str, samples: int) -> None:
        epochs, batch = 4, 1000
        made = {
            "full": lambda: fp.FullData(epochs),
            "fine-pruning": lambda: fp.FinePruning(fp.Schedule(epochs, 4, 2), prune=0.25),
            "infobatch": lambda: fp.InfoBatch(epochs),
            "adaptive": lambda: fp.Adaptive(epochs, save=0.35, rates=[1.0, 0.5, 0.2, 0.1]),
        }[policy]()
        self.pruner = fp.Pruner(samples, made, batch_size=batch)
        self.epochs = iter(self.pruner.epochs())
        next(self.epochs)
        chance = torch.Generator().manual_seed(0)
        for index in self.pruner.sampler.order().split(batch):
            self.pruner.record(index, torch.rand(len(index), generator=chance))

    def time_next_epoch(self, policy: str, samples: int) -> None:
        next(self.epochs)
        self.pruner.sampler.order()
