"""Checks of a composed Hydra config, before anything is built from it.

Hydra refuses an override of a key that does not exist, but lets ``+model.widht=5`` add one, and hands whatever type
it parsed to the constructor. Here every key of every ``_target_`` node is held against the signature that takes it:
names, and types as far as the annotations say them.
"""

from __future__ import annotations

import difflib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

from hydra.utils import get_object
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, InterpolationResolutionError, MissingMandatoryValue

from samu_lm.errors import ConfigError

_HYDRA_KEYS = {"_target_", "_args_", "_partial_", "_convert_", "_recursive_"}
_SCALARS = (bool, int, float, str)


def config_dir() -> Path:
    """The folder of config groups: ``configs/`` of a source tree, or the copy inside an installed wheel.

    Raises:
        ConfigError: neither exists.
    """
    package = Path(__file__).resolve().parent
    for folder in (package.parent / "configs", package / "configs"):
        if (folder / "model").is_dir():
            return folder
    raise ConfigError("configs", package.parent / "configs", "no config folder there; reinstall samu-lm")


def nearest(name: str, known: Iterable[str]) -> str:
    """A clause naming the known key closest to ``name``, or listing all of them where none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]}?" if close else f"known keys: {', '.join(names)}"


def check_config(cfg: DictConfig, known: Mapping[str, Sequence[str] | None]) -> None:
    """Refuses a config that names keys nobody reads, holds values of a wrong type, or refers to missing values.

    Args:
        cfg: the composed config.
        known: every top-level key; for a plain node (neither a ``_target_`` node nor a set of them) its child keys,
            None for all others.

    Raises:
        ConfigError: the first fault found, by its full key.
    """
    _check_interpolations(cfg, "")
    for key in cfg:
        name = str(key)
        if name not in known:
            raise ConfigError(name, _show(cfg, name), f"unknown key; {nearest(name, known)}")
        children = known[name]
        node = cfg[name]
        if children is not None and isinstance(node, DictConfig):
            for child in node:
                if str(child) not in children:
                    full = f"{name}.{child!s}"
                    raise ConfigError(full, _show(node, str(child)), f"unknown key; {nearest(str(child), children)}")
        else:
            _check_node(node, name)


def _show(node: DictConfig, key: str) -> Any:
    value = node[key]
    return OmegaConf.to_container(value) if isinstance(value, DictConfig | ListConfig) else value


def _check_interpolations(node: Any, path: str) -> None:
    if not isinstance(node, DictConfig | ListConfig) or node._is_missing() or node._is_none():
        return
    keys: Iterable[Any] = node if isinstance(node, DictConfig) else range(len(node))
    for key in keys:
        name = str(key)
        full = f"{path}.{name}" if path else name
        raw = OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[index]
        try:
            value = node[key]
        except InterpolationKeyError as error:
            raise ConfigError(
                full, raw, f"refers to a config value that does not exist ({_first_line(error)})"
            ) from None
        except InterpolationResolutionError as error:
            raise ConfigError(full, raw, f"cannot be resolved ({_first_line(error)})") from None
        except MissingMandatoryValue:
            raise ConfigError(full, "???", f"has no value; give one with {full}=...") from None
        _check_interpolations(value, full)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _check_node(node: Any, path: str) -> None:
    if isinstance(node, ListConfig):
        for index, item in enumerate(node):
            _check_node(item, f"{path}[{index}]")
        return
    if not isinstance(node, DictConfig) or node._is_none():
        return
    if "_target_" in node:
        _check_target(node, path)
        return
    for key, value in node.items():
        full = f"{path}.{key!s}"
        if value is not None and not (isinstance(value, DictConfig) and ("_target_" in value or not value)):
            raise ConfigError(full, value, f"unknown key; {path} holds named parts, each with a _target_")
        _check_node(value, full)


def _check_target(node: DictConfig, path: str) -> None:
    try:
        target = get_object(node["_target_"])
    except Exception as error:  # Hydra raises ImportError, ValueError or what the module itself raises
        raise ConfigError(f"{path}._target_", node["_target_"], f"cannot be imported ({_first_line(error)})") from error
    parameters, hints = signature_of(target)
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for key, value in node.items():
        name, full = str(key), f"{path}.{key!s}"
        if name in _HYDRA_KEYS:
            continue
        if name not in parameters:
            if anything:
                continue
            raise ConfigError(full, value, f"unknown key; {nearest(name, parameters)}")
        parameter = parameters[name]
        if value is None and parameter.default is None:
            continue
        hint = hints.get(name, Any)
        if plain := _plain_values(hint):
            for entry, item in value.items() if isinstance(value, DictConfig) else ():
                if not value_matches(item, plain):
                    raise ConfigError(
                        f"{full}.{entry!s}", item, f"wrong type {type(item).__name__}; must be {_spell(plain)}"
                    )
        else:
            _check_node(value, full)
        if not value_matches(value, hint):
            raise ConfigError(full, value, f"wrong type {type(value).__name__}; must be {_spell(hint)}")


def _plain_values(hint: Any) -> Any:
    """The type of the values of a mapping of numbers or texts by name; None for any other kind of parameter."""
    for option in (hint, *typing.get_args(hint)):
        origin, arguments = typing.get_origin(option), typing.get_args(option)
        if inspect.isclass(origin) and issubclass(origin, Mapping) and arguments[-1] in _SCALARS:
            return arguments[-1]
    return None


def signature_of(target: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], dict[str, Any]]:
    """Parameters of a class's constructor or of a function, without ``self``, and their resolved annotations."""
    parameters = dict(inspect.signature(target).parameters)
    function = target.__init__ if inspect.isclass(target) else target
    function = inspect.unwrap(function)
    annotations = {k: v for k, v in getattr(function, "__annotations__", {}).items() if k != "return"}
    try:
        hints = typing.get_type_hints(
            types.SimpleNamespace(__annotations__=annotations), globalns=getattr(function, "__globals__", {})
        )
    except (NameError, TypeError):  # names that exist for a type checker only
        hints = {}
    return parameters, hints


def value_matches(value: Any, hint: Any) -> bool:
    """Whether a config value can be meant for a parameter annotated ``hint``; unknown kinds of hint accept all."""
    origin = typing.get_origin(hint)
    if hint is Any or hint is inspect.Parameter.empty or isinstance(hint, typing.TypeVar):
        return True
    if isinstance(value, DictConfig) and "_target_" in value:
        return True
    if origin in (Union, types.UnionType):
        return any(value_matches(value, option) for option in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if hint is type(None) or value is None:
        return value is None and hint is type(None)
    if hint in _SCALARS:
        if hint is float:
            return isinstance(value, int | float) and not isinstance(value, bool)
        return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    container = origin or hint
    if inspect.isclass(container) and issubclass(container, Path):
        return isinstance(value, str)
    if inspect.isclass(container) and issubclass(container, Mapping):
        return isinstance(value, DictConfig)
    if inspect.isclass(container) and issubclass(container, list | tuple | set | Sequence):
        return isinstance(value, ListConfig)
    # An object that only a _target_ node can make, or a kind of annotation not known here.
    return not isinstance(value, _SCALARS) if inspect.isclass(container) and origin is None else True


def _spell(hint: Any) -> str:
    if inspect.isclass(hint) and typing.get_origin(hint) is None:
        return hint.__name__
    return str(hint).replace("typing.", "").replace("NoneType", "None")
