"""`--preset smoke|small|paper`: settings of an experiment that go together; a flag overrules its preset."""

from typing import Literal

Preset = Literal["smoke", "small", "paper"]
