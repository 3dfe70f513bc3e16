"""A small ResNet-9, which fits 10,000 images in half an hour on one core."""

import torch
import torch.nn.functional as F
from torch import nn

from fineprune.networks.resnet import init_convolutions

# The logits are multiplied by this factor, so that the first updates are not too large.
_LOGIT_SCALE = 0.25


class ResNet9(nn.Module):
    """Eight 3x3 convolutions with batch normalisation and one linear layer.

    The form is that of fast trainings on CIFAR-10 (Page 2018, "How to train your ResNet"), by
    default with a quarter of the channels. Unlike the thin ResNets of the papers, it learns even
    wrong labels by heart within tens of epochs. H and W are at least 8.

    Args:
        classes: The number of classes.
        channels: The number of channels of the images.
        width: The number of channels after the first convolution, 64 in Page's network. The last
            one has eight times as many.
    """

    def __init__(self, classes: int = 10, channels: int = 3, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _convolution(channels, width),
            _convolution(width, 2 * width, pooled=True),
            _Residual(2 * width),
            _convolution(2 * width, 4 * width, pooled=True),
            _convolution(4 * width, 8 * width, pooled=True),
            _Residual(8 * width),
        )
        self.linear = nn.Linear(8 * width, classes, bias=False)
        init_convolutions(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of a batch of images."""
        x = F.adaptive_max_pool2d(self.features(x), 1).flatten(1)
        logits: torch.Tensor = self.linear(x)
        return logits * _LOGIT_SCALE


class _Residual(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(_convolution(width, width), _convolution(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.convolutions(x)
        return x + y


def _convolution(in_channels: int, width: int, *, pooled: bool = False) -> nn.Module:
    """Return a 3x3 convolution, its normalisation and ReLU, and max-pooling if asked for."""
    layers: list[nn.Module] = [
        nn.Conv2d(in_channels, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
    ]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pooled else []))
