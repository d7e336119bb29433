"""`--preset smoke|small|paper`: settings of an experiment that go together; a flag overrules its preset."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal, TypeVar

Preset = Literal["smoke", "small", "paper"]
Config = TypeVar("Config", bound=Any)


def resolved(config: Config, presets: Mapping[Preset, Mapping[str, Any]]) -> Config:
    """Return the config with every field that is None taken from its preset, where that has it."""
    chosen = presets[config.preset]
    missing = [field.name for field in fields(config) if getattr(config, field.name) is None]
    return replace(config, **{name: chosen[name] for name in missing if name in chosen})
