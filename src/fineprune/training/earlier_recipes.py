"""Recipes that earlier versions wrote, which must mean the same as when they were written."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from fineprune.training.settings import IMAGE_SIZE

# Earlier versions wrote this into every recipe, also for data that had no such setting.
_OLD_TRAIN_SIZE = 1024

# A recipe with all of these settings was written by a run; without the seed of the label noise, it
# was written before CIFAR had a ``train_size``.
_ALWAYS_WRITTEN = frozenset({"epochs", "accumulation", "drop_last", "nesterov", "label_smoothing"})
_SINCE_CIFAR_HAS_A_SIZE = "label_noise_seed"

# Recipes of all data but image files have this size, which is not the default of the setting.
_IMAGE_SIZE = {"image_size": IMAGE_SIZE}


def as_meant(sections: Mapping[str, Mapping[str, Any]], *, set_now: bool) -> dict[str, Any]:
    """Return the sections of a recipe without a ``train_size`` that had no effect.

    Args:
        sections: The settings of each section.
        set_now: Whether ``train_size`` was set by the user of this version.
    """
    data = dict(sections.get("data", {}))
    name = data.get("name", "digits")
    if data.get("train_size") != _OLD_TRAIN_SIZE or name in ("digits", "synthetic"):
        return dict(sections)
    written = _ALWAYS_WRITTEN.issubset(sections.get("training", {}))
    earlier = written and _SINCE_CIFAR_HAS_A_SIZE not in data
    if ":" in str(name) or (earlier and not set_now):
        del data["train_size"]
    return {**sections, "data": data}


def completed(
    sections: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the sections of a recipe that a run wrote, with the settings that are newer.

    Args:
        sections: The settings of each section.
        settings: The dataclass of each section.
    """
    meant = as_meant(sections, set_now=False)
    full = {}
    for section in dict.fromkeys([*settings, *meant]):
        fields = dataclasses.fields(settings[section]) if section in settings else ()
        newer = {
            field.name: list(field.default) if isinstance(field.default, tuple) else field.default
            for field in fields
            if field.default not in (None, dataclasses.MISSING)
        }
        if section == "data":
            newer |= _IMAGE_SIZE
        full[section] = {**newer, **meant.get(section, {})}
    return full
