"""The run section of a recipe."""

import dataclasses
import re
from typing import Annotated, Literal

from msgspec import Meta

from fineprune.errors import InputError
from fineprune.training.convert import Count, Positive, Whole

# With very many threads, OpenMP ends the process without a message.
_MOST_THREADS = 1024

# The sample order of an epoch is drawn from a number plus the epoch, as in DistributedSampler. The
# numbers of two seeds are further apart than any number of epochs, so they share no order.
_ORDER_STEP = 1_000_003
_LARGEST_SEED = 2**32 - 1

_DEVICES = re.compile(r"auto|cpu|cuda(:[0-9]+)?|mps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Where and how the run is carried out. Only the seed changes what is learned.

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
        checkpoint_steps: The number of batches between two checkpoints within an epoch; 0 for none.
            A checkpoint waits for the end of an optimizer step.
        history: Whether to keep evidence on the labels, for ``fineprune inspect``, and the loss of
            each sample in each epoch: two bytes per sample and epoch.
        arm: The name of the run's arm in a comparison; None for the name of the policy.
        rate_factor: The multiple of a comparison's learning rate that ``fineprune compare --tune``
            chose, and that ``training.lr`` is already multiplied by; None if none was chosen.
        code: The SHA-256 digest of the source files of the user's own data, network and policy,
            which a run sets when it begins and checks when it goes on; None without such code.
    """

    seed: Annotated[int, Meta(ge=0, le=_LARGEST_SEED)] = 0
    device: str = "auto"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"
    threads: Annotated[int, Meta(ge=0, le=_MOST_THREADS)] = 0
    checkpoint_every: Count = 1
    checkpoint_steps: Whole = 0
    history: bool = True
    arm: str | None = None
    rate_factor: Positive | None = None
    code: str | None = None

    def __post_init__(self) -> None:
        if not _DEVICES.fullmatch(self.device):
            raise InputError(
                f"expected run.device to be auto, cpu, cuda, cuda:N or mps, got {self.device!r}"
            )

    @property
    def order_seed(self) -> int:
        """The seed that a ``Pruner`` of the run gets."""
        return self.seed * _ORDER_STEP
