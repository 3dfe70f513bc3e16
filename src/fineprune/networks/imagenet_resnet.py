"""ResNets (He et al. 2016) in their ImageNet form, with the names of torchvision's parameters.

The stem is a 7x7 convolution with stride 2 and a max-pooling. Four stages of widths 64, 128, 256
and 512 follow, then global average pooling and one linear layer, ``fc``. In a bottleneck block that
halves the height and width, the 3x3 convolution has the stride. This form is known as v1.5; in the
paper, the first 1x1 convolution has it. The names in the state dict (``conv1``, ``bn1``,
``layer1.0.conv1``, ``layer1.0.downsample.0``, ``fc``) and the shapes equal those of torchvision, so
that its pretrained weights fit.

The weights of the convolutions are initialised as in He et al. 2015, normal with variance
2 / fan-out. Batch normalisation starts with scale 1 and shift 0, also at the end of a block. The
linear layer has torch's default, uniform within 1 / sqrt(fan-in).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

_WIDTHS = (64, 128, 256, 512)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 projection if the shape changes."""

    expansion = 1

    def __init__(self, entering: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(entering, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _downsample(entering, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features of shape (B, width, height / stride, width / stride)."""
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        return F.relu(y.add_(x if self.downsample is None else self.downsample(x)), inplace=True)


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution to four times the width, and a shortcut."""

    expansion = 4

    def __init__(self, entering: int, width: int, stride: int) -> None:
        super().__init__()
        leaving = width * self.expansion
        self.conv1 = nn.Conv2d(entering, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, leaving, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(leaving)
        self.downsample = _downsample(entering, leaving, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features of shape (B, 4 * width, height / stride, width / stride)."""
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        return F.relu(y.add_(x if self.downsample is None else self.downsample(x)), inplace=True)


class ImageNetResNet(nn.Module):
    """A stem, four stages of blocks, global average pooling and one linear layer.

    The input is float images of shape (B, channels, H, W), usually 224x224; a batch of one needs
    more than 32x32 while it trains. The output is logits of shape (B, classes).

    Args:
        block: The class of the blocks.
        blocks: The number of blocks in each of the four stages.
        classes: The number of classes.
        channels: The number of channels of the images.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: Sequence[int],
        classes: int = 1000,
        channels: int = 3,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, _WIDTHS[0], 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(_WIDTHS[0])
        entering = _WIDTHS[0]
        stages: list[nn.Module] = []
        for stage, (width, number) in enumerate(zip(_WIDTHS, blocks, strict=True)):
            made: list[nn.Module] = []
            for place in range(number):
                made.append(block(entering, width, 2 if stage and not place else 1))
                entering = width * block.expansion
            stages.append(nn.Sequential(*made))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(entering, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of a batch of images."""
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = F.max_pool2d(x, 3, 2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: torch.Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def imagenet_resnet18(classes: int = 1000, channels: int = 3) -> ImageNetResNet:
    """Build ResNet-18: basic blocks 2-2-2-2."""
    return ImageNetResNet(BasicBlock, (2, 2, 2, 2), classes, channels)


def imagenet_resnet34(classes: int = 1000, channels: int = 3) -> ImageNetResNet:
    """Build ResNet-34: basic blocks 3-4-6-3."""
    return ImageNetResNet(BasicBlock, (3, 4, 6, 3), classes, channels)


def imagenet_resnet50(classes: int = 1000, channels: int = 3) -> ImageNetResNet:
    """Build ResNet-50: bottleneck blocks 3-4-6-3."""
    return ImageNetResNet(Bottleneck, (3, 4, 6, 3), classes, channels)


def imagenet_resnet101(classes: int = 1000, channels: int = 3) -> ImageNetResNet:
    """Build ResNet-101: bottleneck blocks 3-4-23-3."""
    return ImageNetResNet(Bottleneck, (3, 4, 23, 3), classes, channels)


def _downsample(entering: int, leaving: int, stride: int) -> nn.Module | None:
    """Return the projection of a block's shortcut; None if the shape stays the same."""
    if entering == leaving and stride == 1:
        return None
    return nn.Sequential(
        nn.Conv2d(entering, leaving, 1, stride, bias=False), nn.BatchNorm2d(leaving)
    )
