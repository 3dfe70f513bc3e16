"""Pruning with ``DistributedDataParallel``, which continues where it was stopped.

    torchrun --nproc-per-node 2 examples/ddp.py
    torchrun --nproc-per-node 2 examples/ddp.py CHECKPOINT

It takes seconds. The numbered lines are for the pruning. With a second argument, the training
writes this file after each epoch, and continues from it if it exists, with the same number of
processes: with another one, the scheduler would need another number of steps.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import fineprune as fp  # 1

EPOCHS, BATCH = 8, 16


def main(checkpoint: Path | None = None) -> tuple[torch.nn.Module, fp.Pruner, int]:
    """Train in an initialised process group; return the model, the pruner and the steps taken.

    Args:
        checkpoint: The file to write after each epoch, and to continue from; None for none.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    train_set = TensorDataset(x[:640], torch.tensor(digits.target)[:640])

    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    model = DistributedDataParallel(network.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    pruner = fp.Pruner(train_set, fp.Adaptive(EPOCHS, save=0.3), batch_size=BATCH)  # 2
    steps = pruner.total_steps()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps)
    pruner.set_rates(scheduler, by="steps")  # 3
    if checkpoint is not None and checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        pruner.load_state_dict(state["pruner"])

    taken = 0
    loader = pruner.loader()  # 4
    for epoch in pruner.epochs():  # 5
        for index, (inputs, targets) in loader:  # 6
            inputs, targets = inputs.to(device), targets.to(device)
            logits = model(inputs)
            losses = F.cross_entropy(logits, targets, reduction="none")
            pruner.record(index, losses, logits, targets).backward()  # 7
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            taken += 1
        pruner.synchronize()  # On all ranks, because only one of them saves.
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: trained on {len(pruner.plan.kept)} of 640 samples")
            if checkpoint is not None:
                state = {
                    "network": network.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "pruner": pruner.state_dict(),
                }
                torch.save(state, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").replace(checkpoint)
    return model, pruner, taken


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    try:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    finally:
        dist.destroy_process_group()
