"""Residual blocks (He et al. 2016), with the names of torchvision's parameters.

In a bottleneck block that halves the height and width, the 3x3 convolution has the stride. This
form is known as v1.5; in the paper, the first 1x1 convolution has it. Convolutions before a batch
normalisation have no bias, because the normalisation would remove it.
"""

import torch
import torch.nn.functional as F
from torch import nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 projection if the shape changes."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _downsample(in_channels, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features of shape (B, width, height / stride, width / stride)."""
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        return F.relu(y.add_(x if self.downsample is None else self.downsample(x)), inplace=True)


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution to four times the width, and a shortcut."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.downsample = _downsample(in_channels, out_channels, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features of shape (B, 4 * width, height / stride, width / stride)."""
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        return F.relu(y.add_(x if self.downsample is None else self.downsample(x)), inplace=True)


def residual_stage(
    block: type[BasicBlock] | type[Bottleneck],
    in_channels: int,
    width: int,
    number: int,
    stride: int,
) -> list[nn.Module]:
    """Return the blocks of a stage, the first of which has the stride.

    Args:
        block: The class of the blocks.
        in_channels: The number of channels of the stage's input.
        width: The number of channels of the 3x3 convolutions.
        number: The number of blocks.
        stride: The factor by which the stage reduces the height and width.
    """
    out_channels = width * block.expansion
    first = block(in_channels, width, stride)
    return [first, *(block(out_channels, width, 1) for _ in range(number - 1))]


def init_convolutions(network: nn.Module) -> None:
    """Draw the weights of all convolutions as in He et al. 2015: normal, variance 2 / fan-out."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _downsample(in_channels: int, out_channels: int, stride: int) -> nn.Module | None:
    """Return the projection of a block's shortcut; None if the shape stays the same."""
    if in_channels == out_channels and stride == 1:
        return None
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
    )
