"""VGG networks (Simonyan & Zisserman 2015) for small images, with batch normalisation.

The convolutions are those of configurations B, D and E in the paper's Table 1. One linear layer
maps the 512 features after the last pooling to the classes. The weights are initialised as the
paper's footnote says, after Glorot & Bengio (2010), and the biases start at zero. Convolutions
before a batch normalisation have no bias, because the normalisation would remove it.
"""

import torch
import torch.nn.functional as F
from torch import nn

# The number of 3x3 convolutions in each of the five stages. A stage ends with a 2x2 max-pooling.
_STAGES = {13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
_WIDTHS = (64, 128, 256, 512, 512)


class VGG(nn.Module):
    """Five stages of 3x3 convolutions, and one linear layer.

    H and W are at least 32; the features of larger images are averaged after the last pooling.
    """

    def __init__(self, depth: int, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        in_channels = channels
        for width, number in zip(_WIDTHS, _STAGES[depth], strict=True):
            for _ in range(number):
                layers += [
                    nn.Conv2d(in_channels, width, 3, padding=1, bias=False),
                    nn.BatchNorm2d(width),
                    nn.ReLU(inplace=True),
                ]
                in_channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.linear = nn.Linear(in_channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_normal_(module.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of a batch of images."""
        logits: torch.Tensor = self.linear(F.adaptive_avg_pool2d(self.features(x), 1).flatten(1))
        return logits
