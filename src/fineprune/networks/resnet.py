"""ResNets (He et al. 2016) in two forms: thin ones for 32x32 images, and those for ImageNet.

Both consist of the same residual blocks, whose parameters have the names of torchvision. In a
bottleneck block that halves the height and width, the 3x3 convolution has the stride (v1.5), not
the first 1x1 convolution as in the paper. Convolutions before a batch normalisation have no bias,
which it would remove. The weights are initialised as in He et al. 2015, and batch normalisation
starts with scale 1 and shift 0, also at the end of a block.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_THIN, _WIDE = (16, 32, 64), (64, 128, 256, 512)


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
        return F.relu(self.bn2(self.conv2(y)).add_(self.downsample(x)), inplace=True)


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
        return F.relu(self.bn3(self.conv3(y)).add_(self.downsample(x)), inplace=True)


Block = type[BasicBlock] | type[Bottleneck]


class ResNet(nn.Module):
    """The thin form: three stages of widths 16, 32 and 64 instead of four.

    ResNet-18/34/50 of the fine-pruning paper have the block counts of the first three stages of the
    ImageNet networks with these names. The stem is one 3x3 convolution; global average pooling and
    one linear layer, whose bias starts at zero, follow the stages. H and W are at least 4.
    """

    def __init__(
        self,
        block: Block,
        blocks: Sequence[int],
        classes: int = 10,
        channels: int = 3,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, _THIN[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(_THIN[0])
        self.stages = nn.Sequential(*itertools.chain(*stages_of(block, _THIN, blocks, _THIN[0])))
        self.linear = nn.Linear(_THIN[-1] * block.expansion, classes)
        init_convolutions(self)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of a batch of images."""
        x = self.stages(F.relu(self.norm(self.conv(x)), inplace=True))
        logits: torch.Tensor = self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


class ImageNetResNet(nn.Module):
    """The form for ImageNet, with the names and shapes of torchvision's parameters.

    The stem is a 7x7 convolution with stride 2 and a max-pooling. Four stages of widths 64, 128,
    256 and 512 follow, then global average pooling and one linear layer, which is initialised as
    torch does it, uniform within 1 / sqrt(fan-in). Images usually have 224x224 pixels; a batch of
    one needs more than 32x32 while it trains.
    """

    def __init__(
        self,
        block: Block,
        blocks: Sequence[int],
        classes: int = 1000,
        channels: int = 3,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, _WIDE[0], 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(_WIDE[0])
        stages = [nn.Sequential(*stage) for stage in stages_of(block, _WIDE, blocks, _WIDE[0])]
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(_WIDE[-1] * block.expansion, classes)
        init_convolutions(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of a batch of images."""
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = F.max_pool2d(x, 3, 2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: torch.Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def init_convolutions(network: nn.Module) -> None:
    """Draw the weights of all convolutions as in He et al. 2015: normal, variance 2 / fan-out."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def stages_of(
    block: Any, widths: Sequence[int], blocks: Sequence[int], in_channels: int
) -> list[list[nn.Module]]:
    """Return the blocks of each stage. All stages but the first halve the height and width.

    ``widths`` are the numbers of channels of the 3x3 convolutions in each stage.
    """
    stages: list[list[nn.Module]] = []
    for width, number in zip(widths, blocks, strict=True):
        stages.append([])
        for place in range(number):
            stride = 2 if len(stages) > 1 and place == 0 else 1
            stages[-1].append(block(in_channels, width, stride))
            in_channels = width * block.expansion
    return stages


def _downsample(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """Return the projection of a block's shortcut, if the shape changes."""
    if in_channels == out_channels and stride == 1:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
    )
