"""Hydra's and OmegaConf's complaints about a value, said in the user's terms."""

from __future__ import annotations

import re

# The first line of their message, and ours: {key} is the dotted key, the other names are groups of the pattern.
_SENTENCES = (
    (r"Value '(?P<value>.*)' of type '.*' could not be converted to Integer", "{key}={value} must be a whole number"),
    (r"Value '(?P<value>.*)' of type '.*' could not be converted to Float", "{key}={value} must be a number"),
    (r"Value '(?P<value>.*)' is not a valid bool", "{key}={value} must be true or false"),
    (r"Cannot convert '.*' to string: '(?P<value>.*)'", "{key}={value} must be a text"),
    (r"Invalid value assigned: .* is not a ListConfig, list or tuple", "{key} must be a list, for instance {key}=[a,b]"),
    (r"Cannot assign .* to Dict", "{key} must be a mapping, for instance '{key}={{a: 1}}'"),
    (r"field '(?P<name>.*)' is not Optional", "{name} must not be null"),
    (
        r"Ambiguous value for argument '(?P<name>[^=]*)=(?P<value>.*)'",
        "{name}={value} holds several values: add -m to sweep over them (sao train -m ... {name}={value}), or write a list as {name}=[{value}]",
    ),
)


def explain(line: str, key: str) -> str | None:
    """One sentence for the first line of an error about `key` (empty when the error names none); None when it is about something else."""
    for pattern, sentence in _SENTENCES:
        match = re.match(pattern, line)
        if match:
            return sentence.format(key=key, **match.groupdict())
    return None
