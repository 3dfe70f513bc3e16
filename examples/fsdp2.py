"""Pruning with FSDP2 (``fully_shard``) and a distributed checkpoint. Takes seconds.

    torchrun --nproc-per-node 2 examples/fsdp2.py
    torchrun --nproc-per-node 2 examples/fsdp2.py CHECKPOINT_FOLDER

The lines of the pruning are those of a loop with DDP. With a second argument, the training
continues from a checkpoint, which may have been written inside an epoch.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import fineprune as fp

EPOCHS, BATCH = 8, 16


class Training:
    """What is divided among the ranks; a ``Stateful`` of ``torch.distributed.checkpoint``."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def main(
    save_to: Path | None = None, save_at: int = 0, resume_from: Path | None = None
) -> tuple[torch.nn.Module, fp.Pruner, int]:
    """Train in an initialised process group; return the model, the pruner and the steps taken.

    Args:
        save_to: The folder to which a checkpoint is written; None for no checkpoint.
        save_at: The optimizer step after which it is written. The training ends there.
        resume_from: The folder of a checkpoint from which the training continues.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",))
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    train_set = TensorDataset(x[:640], torch.tensor(digits.target)[:640])

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    fully_shard(model.to(device), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    policy, group = fp.Adaptive(EPOCHS, save=0.3), mesh["dp"].get_group()
    pruner = fp.Pruner(train_set, policy, batch_size=BATCH, process_group=group)
    steps = pruner.total_steps()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps)
    pruner.set_rates(scheduler, by="steps")
    loader = pruner.loader()
    training = Training(model, optimizer)
    if resume_from is not None:
        load({"training": training}, checkpoint_id=resume_from)
        same_on_all = torch.load(resume_from / "same_on_all.pt", weights_only=True)
        scheduler.load_state_dict(same_on_all["scheduler"])
        pruner.load_state_dict(same_on_all["pruner"])

    taken = 0
    for epoch in pruner.epochs():
        for index, (inputs, targets) in loader:
            inputs, targets = inputs.to(device), targets.to(device)
            logits = model(inputs)
            losses = F.cross_entropy(logits, targets, reduction="none")
            pruner.record(index, losses, logits, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            taken += 1
            if save_to is not None and taken == save_at:
                pruner.synchronize()  # Inside an epoch, before the state is taken.
                save({"training": training}, checkpoint_id=save_to)
                # Beside it, since a distributed checkpoint is loaded into a state of the same
                # structure, and that of a pruner's state depends on where it is taken.
                if dist.get_rank() == 0:
                    same = {"scheduler": scheduler.state_dict(), "pruner": pruner.state_dict()}
                    torch.save(same, save_to / "same_on_all.pt")
                return model, pruner, taken
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: trained on {len(pruner.plan.kept)} of 640 samples")
    return model, pruner, taken


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    try:
        main(resume_from=Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    finally:
        dist.destroy_process_group()
