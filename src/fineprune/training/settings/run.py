"""The run section of a recipe."""

import dataclasses
import re

from fineprune.errors import InputError, check_at_least, check_one_of, check_positive

# TOML's integers are signed and have 64 bits, and an epoch's order is drawn from seed + epoch.
_LARGEST_SEED = 2**63 - 1

# With very many threads, OpenMP ends the process without a message.
_MOST_THREADS = 1024

_DEVICES = re.compile(r"auto|cpu|cuda(:[0-9]+)?|mps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Where and how the run is carried out. None of these settings changes the method.

    Attributes:
        seed: The seed of the initial weights, the sample order, the breaking of ties and the
            augmentation.
        device: The device: ``auto``, ``cpu``, ``cuda``, ``cuda:1`` or ``mps``, for example.
        precision: The precision: ``auto``, ``float32`` or ``bfloat16`` (autocast).
        compile: Whether to train the network through ``torch.compile``, on a GPU with CUDA graphs:
            ``auto``, ``on`` or ``off``.
        threads: The number of CPU threads of each process; 0 divides the machine's cores among the
            processes.
        checkpoint_every: The number of epochs between two checkpoints.
        checkpoint_steps: The number of batches between two checkpoints within an epoch; 0 for none
            within an epoch. A checkpoint waits for the end of an optimizer step.
        history: Whether to keep the loss and the prediction of each sample in each epoch, for
            ``fineprune inspect``: three bytes per sample and epoch, four with more than 255
            classes, six with more than 65,535.
        tensorboard: Whether to write the metrics of each epoch as an event file for TensorBoard
            into the run's folder. This needs the extra ``tensorboard``.
        arm: The name of the run's arm in a comparison; None for the name of the policy.
        rate_factor: The multiple of a comparison's learning rate that ``fineprune compare --tune``
            chose, and that ``training.lr`` is already multiplied by; None if none was chosen.
    """

    seed: int = 0
    device: str = "auto"
    precision: str = "auto"
    compile: str = "auto"
    threads: int = 0
    checkpoint_every: int = 1
    checkpoint_steps: int = 0
    history: bool = True
    tensorboard: bool = False
    arm: str | None = None
    rate_factor: float | None = None

    def __post_init__(self) -> None:
        if not _DEVICES.fullmatch(self.device):
            raise InputError(
                f"expected run.device to be auto, cpu, cuda, cuda:N or mps, got {self.device!r}"
            )
        check_one_of("run.precision", self.precision, ("auto", "float32", "bfloat16"))
        check_one_of("run.compile", self.compile, ("auto", "on", "off"))
        check_at_least("run.checkpoint_every", self.checkpoint_every, 1)
        for name in ("seed", "threads", "checkpoint_steps"):
            check_at_least(f"run.{name}", getattr(self, name), 0)
        if self.rate_factor is not None:
            check_positive("run.rate_factor", self.rate_factor)
        if self.threads > _MOST_THREADS:
            raise InputError(f"expected run.threads of at most {_MOST_THREADS}, got {self.threads}")
        if self.seed > _LARGEST_SEED:
            raise InputError(f"expected run.seed to be at most 2^63 - 1, got {self.seed}")
