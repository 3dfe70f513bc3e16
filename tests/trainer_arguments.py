"""Arguments of small trainings in the ``Trainer`` of transformers and those derived from it."""

QUIET = {
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "optim": "sgd",
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "logging_strategy": "epoch",
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


def arguments(folder, made, **changes):
    """Return arguments of a kind, with SGD of a fixed rate if there is no other scheduler."""
    return made(**{"output_dir": str(folder), **QUIET, **changes})
