"""The longest sequence by a model's config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from transformers import PretrainedConfig

_DEFAULT: Final = 32768  # for a class whose config has no bound
_CHANGING: Final = ("dynamic", "longrope")
_MOST: Final = 2**24  # for any factor in a config


def max_positions(config: PretrainedConfig) -> int:
    """Return the longest sequence that the class computes as intended.

    Frequencies that are scaled for longer sequences than the config's own reach as far as the scaling does: YaRN's are
    of so many times the original length, linear ones of the named. Those that change behind a length would depend on
    the longest sequence of a step: there they end.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    named = getattr(text, "max_position_embeddings", None)
    most = named if type(named) is int and named > 0 else _DEFAULT
    ends = [
        one.get("original_max_position_embeddings") or most
        for one in (rope, *rope.values())  # one for all layers, or one for each kind of them
        if isinstance(one, dict) and one.get("rope_type") in _CHANGING
    ]
    return int(min(_scaled(most, rope), *ends)) if ends else _scaled(most, rope)


def _scaled(named: int, rope: Mapping[str, Any]) -> int:
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings") or named
    if not isinstance(factor, int | float) or not 1 <= factor <= _MOST:
        return named
    lengths = {"yarn": original, "linear": named}
    return min(_MOST, max(named, int(lengths.get(rope.get("rope_type", ""), 0) * factor)))
