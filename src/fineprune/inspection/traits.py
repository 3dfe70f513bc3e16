"""What the most skipped pictures look like: brightness, contrast, sharpness and file size."""

import io
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fineprune.inspection.pictures import image_of

# At most this many pictures of each group are measured; more would hardly change the means.
_MOST = 2000


@dataclass(frozen=True)
class Trait:
    """A property of pictures, in the chosen ones and in the others.

    Attributes:
        name: The name of the property.
        chosen, others: The mean in both groups.
        difference: The difference of both means in units of the standard deviation over all
            measured pictures; 0 if all pictures are equal.
    """

    name: str
    chosen: float
    others: float
    difference: float


def traits(pictures: npt.NDArray[np.uint8], chosen: npt.NDArray[np.int64]) -> list[Trait]:
    """Compare some pictures with all others; of each group, at most 2,000 that are drawn.

    Args:
        pictures: The pictures; uint8, shape (N, channels, height, width).
        chosen: The indices of the pictures to compare with the others; int64, shape (n,).
    """
    rng = np.random.default_rng(0)
    others = np.setdiff1d(np.arange(len(pictures)), chosen)
    groups = [
        _measured(pictures[np.sort(rng.permutation(group)[:_MOST])]) for group in (chosen, others)
    ]
    result = []
    for name in groups[0]:
        one, other = groups[0][name], groups[1][name]
        spread = float(np.concatenate([one, other]).std())
        means = float(one.mean()), float(other.mean())
        difference = (means[0] - means[1]) / spread if spread else 0.0
        result.append(Trait(name, *means, difference))
    return result


def _measured(pictures: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[np.float64]]:
    grey = pictures.mean(axis=1, dtype=np.float64) / 255
    inner = grey[:, 1:-1, 1:-1]
    laplacian = (
        grey[:, :-2, 1:-1] + grey[:, 2:, 1:-1] + grey[:, 1:-1, :-2] + grey[:, 1:-1, 2:] - 4 * inner
    )
    return {
        "brightness": grey.mean(axis=(1, 2)),
        "contrast": grey.std(axis=(1, 2)),
        "sharpness": laplacian.std(axis=(1, 2)),
        "file size, bytes": np.array([_png_size(picture) for picture in pictures], np.float64),
    }


def _png_size(picture: npt.NDArray[np.uint8]) -> int:
    file = io.BytesIO()
    image_of(picture).save(file, "PNG")
    return file.tell()
