"""Errors that a user can act on: each names the key, its value and the remedy in one line."""

from __future__ import annotations

from typing import Any, ClassVar


class SamuLMError(Exception):
    """Base of the errors that entry points print as one line, without a traceback, before they end.

    Attributes:
        exit_status: with which status they end; 2 is an error of the user's input.
    """

    exit_status: ClassVar[int] = 2


class ConfigError(SamuLMError, ValueError):
    """A config key, command-line argument or input file that cannot be used.

    Args:
        key: config key or argument as the user writes it, e.g. ``data.path``.
        value: the offending value.
        remedy: what would be right, in one clause.
    """

    def __init__(self, key: str, value: Any, remedy: str) -> None:
        self.key, self.value, self.remedy = key, value, remedy
        super().__init__(f"{key}={value}: {remedy}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, Any, str]]:
        return type(self), (self.key, self.value, self.remedy)


class WriteError(SamuLMError, OSError):
    """A file of the run's folder could not be written."""

    exit_status: ClassVar[int] = 4
