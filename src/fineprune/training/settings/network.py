"""The network section of a recipe."""

import dataclasses

from fineprune.errors import InputError, check_one_of
from fineprune.importing import check_import_name
from fineprune.networks.registry import NETWORKS
from fineprune.networks.weights import SUFFIXES
from fineprune.training.convert import Count


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkSettings:
    """The network.

    Attributes:
        name: A name from ``fineprune.networks``; ``timm:NAME`` or ``torchvision:NAME``; or
            ``module:attribute``, a user-defined class or function that is called with the keyword
            arguments ``classes`` and ``channels``.
        classes: The number of classes; None for that of the dataset.
        weights: A file with pretrained weights, .pth, .pt or .safetensors, as ``load_weights``
            describes it; None to train from the initialisation. A run that is resumed does not read
            it.
        freeze: Prefixes of the names of parameters that are not trained, such as ``layer1``. Batch
            normalisations that they cover stay in evaluation mode.
    """

    name: str = "lenet"
    classes: Count | None = None
    weights: str | None = None
    freeze: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if ":" not in self.name:
            check_one_of("network.name", self.name, tuple(NETWORKS))
        elif self.own or self.name.endswith(":"):
            check_import_name("network.name", self.name)
        if self.weights is not None and not self.weights.endswith(SUFFIXES):
            raise InputError(
                f"expected network.weights to be a file {', '.join(SUFFIXES[:-1])} or "
                f"{SUFFIXES[-1]}, got {self.weights!r}"
            )

    @property
    def own(self) -> bool:
        """Whether the network is the user's own. Building it runs the user's code."""
        library, colon, _ = self.name.partition(":")
        return bool(colon) and library not in ("timm", "torchvision")
