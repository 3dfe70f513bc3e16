"""ResNets (He et al. 2016) in the thin form for 32x32 images: three stages of widths 16, 32 and 64.

ResNet-18/34/50 of the fine-pruning paper have the block counts of the first three stages of the
ImageNet networks with these names, and no fourth stage. The stem is one 3x3 convolution. The
weights are initialised as in He et al. 2015, normal with variance 2 / fan-out, and batch
normalisation starts with scale 1 and shift 0. Convolutions before a batch normalisation have no
bias, because the normalisation would remove it.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

_WIDTHS = (16, 32, 64)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 projection if the shape changes."""

    expansion = 1

    def __init__(self, entering: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(entering, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = _shortcut(entering, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features of shape (B, width, height / stride, width / stride)."""
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        return F.relu(y.add_(self.shortcut(x)), inplace=True)


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution to four times the width, and a shortcut."""

    expansion = 4

    def __init__(self, entering: int, width: int, stride: int) -> None:
        super().__init__()
        leaving = width * self.expansion
        self.conv1 = nn.Conv2d(entering, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, leaving, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(leaving)
        self.shortcut = _shortcut(entering, leaving, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features of shape (B, 4 * width, height / stride, width / stride)."""
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = F.relu(self.norm2(self.conv2(y)), inplace=True)
        y = self.norm3(self.conv3(y))
        return F.relu(y.add_(self.shortcut(x)), inplace=True)


class ResNet(nn.Module):
    """A stem, three stages of blocks, global average pooling and one linear layer.

    The input is float images of shape (B, channels, H, W), with H and W at least 4. The output is
    logits of shape (B, classes).

    Args:
        block: The class of the blocks.
        blocks: The number of blocks in each of the three stages.
        classes: The number of classes.
        channels: The number of channels of the images.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: Sequence[int],
        classes: int = 10,
        channels: int = 3,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, _WIDTHS[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(_WIDTHS[0])
        stages: list[nn.Module] = []
        entering = _WIDTHS[0]
        for stage, (width, number) in enumerate(zip(_WIDTHS, blocks, strict=True)):
            for place in range(number):
                stages.append(block(entering, width, 2 if stage and not place else 1))
                entering = width * block.expansion
        self.stages = nn.Sequential(*stages)
        self.linear = nn.Linear(entering, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of a batch of images."""
        x = self.stages(F.relu(self.norm(self.conv(x)), inplace=True))
        logits: torch.Tensor = self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def resnet18(classes: int = 10, channels: int = 3) -> ResNet:
    """Build the thin ResNet-18: basic blocks 2-2-2."""
    return ResNet(BasicBlock, (2, 2, 2), classes, channels)


def resnet34(classes: int = 10, channels: int = 3) -> ResNet:
    """Build the thin ResNet-34: basic blocks 3-4-6."""
    return ResNet(BasicBlock, (3, 4, 6), classes, channels)


def resnet50(classes: int = 10, channels: int = 3) -> ResNet:
    """Build the thin ResNet-50: bottleneck blocks 3-4-6."""
    return ResNet(Bottleneck, (3, 4, 6), classes, channels)


def _shortcut(entering: int, leaving: int, stride: int) -> nn.Module:
    if entering == leaving and stride == 1:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(entering, leaving, 1, stride, bias=False), nn.BatchNorm2d(leaving)
    )
