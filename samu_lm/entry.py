"""How train.py and eval.py end: errors as one line that names key, value and remedy, and the exit status."""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.experimental.callback import Callback as HydraCallback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from samu_lm.config import config_dir
from samu_lm.errors import ConfigError, SamuLMError, WriteError

log = logging.getLogger(__name__)

USAGE_STATUS, FAILURE_STATUS, INTERRUPTED_STATUS = 2, 1, 130


def launch(main: Callable[[], Any], config_name: str = "train") -> None:
    """Runs a Hydra entry point and ends the process.

    Exit status 0 on success, 2 after an error of the user's input (one line on stderr) or what another `SamuLMError`
    says, 130 after Ctrl-C outside of training, 1 after any other exception (its traceback on stderr, and in the job's
    log).

    Args:
        main: a function decorated with `hydra.main`.
        config_name: its primary config, to suggest keys from.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then hands its own errors to us instead of printing them
    warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated")  # lightning's own use of torch
    status = 0
    try:
        refuse_null_groups(sys.argv[1:])
        sys.argv[1:] = open_data_places(sys.argv[1:])
        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = INTERRUPTED_STATUS
    except SamuLMError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        status = error.exit_status
    except (HydraException, OmegaConfBaseException) as error:
        print(f"error: {reword(error, sys.argv[1:], config_name)}", file=sys.stderr)
        status = USAGE_STATUS
    except Exception:
        traceback.print_exc()
        status = FAILURE_STATUS
    finally:
        _finish_sweep()
    if status:
        sys.stdout.flush()
        sys.exit(status)


@contextlib.contextmanager
def job_errors() -> Iterator[None]:
    """Around the body of a Hydra task: leaves an exception's traceback in the job's log file.

    A `SamuLMError` then ends a single run at once, as one line with its exit status. In a sweep it goes on to Hydra,
    which runs the other jobs first.
    """
    try:
        yield
    except Exception as error:
        sweep = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
        refused = isinstance(error, SamuLMError) and error.exit_status == USAGE_STATUS
        if sweep or not refused:  # a refused run leaves its folder as it was
            _log_traceback(error)
        if isinstance(error, SamuLMError) and not sweep:
            print(f"error: {one_line(error)}", file=sys.stderr)
            raise SystemExit(error.exit_status) from error
        if sweep:
            log.error("the job failed: %s", one_line(error))
        raise


@contextlib.contextmanager
def refused_in_one_line() -> Iterator[None]:
    """For Hydra's callbacks, whose exceptions Hydra only warns of: ends the process on an error of the user's input."""
    try:
        yield
    except SamuLMError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        raise SystemExit(error.exit_status) from error


def make_run_folder(folder: str, key: str = "hydra.run.dir") -> None:
    """Makes the folder that Hydra is about to write to.

    Raises:
        ConfigError: it is empty, or cannot be made.
        WriteError: nothing can be written there.
    """
    if not folder.strip():
        raise ConfigError(key, folder, "is empty; give the folder of this run")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(key, folder, f"cannot be made ({error.strerror}); choose another folder") from error
    probe_folder(Path(folder), f"{key}={folder}")


def probe_folder(folder: Path, name: str) -> None:
    """Writes a file without a name into a folder, large enough to stand for a run's record.

    Args:
        folder: one that exists; it is left as it was.
        name: what an error calls it.

    Raises:
        WriteError: it cannot be written, as on a full disk or one that became read-only.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
    except OSError as error:
        raise WriteError(
            f"{name}: cannot be written ({error.strerror}); free space, or choose another folder"
        ) from error


_PROBE_BYTES = 1 << 16


class RunFolder(HydraCallback):
    """Checks a run's folder before Hydra writes there; ``hydra.callbacks`` of evaluations."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        with refused_in_one_line():
            make_run_folder(config.hydra.run.dir)


def open_data_places(arguments: list[str]) -> list[str]:
    """Has Hydra take a resumed run's data places, which the checkpoint's kind of data reads, into any composed one."""
    if not any(re.fullmatch(r"resume=(?!null$).+", argument) for argument in arguments):
        return arguments
    return [
        f"++{a}" if re.match(r"data\.(path|cache_dir|sources\.[^=]+\.(path|cache_dir))=", a) else a for a in arguments
    ]


def refuse_null_groups(arguments: list[str]) -> None:
    """Hydra takes no null for a group that has a choice; it says so without naming the group."""
    for argument in arguments:
        name, _, value = argument.partition("=")
        if value == "null" and (config_dir() / name).is_dir() and name.isidentifier() and name != "experiment":
            choices = ", ".join(sorted(path.stem for path in (config_dir() / name).glob("*.yaml")))
            raise ConfigError(name, "null", f"choose one of {choices}")


def one_line(error: BaseException) -> str:
    """An exception as one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, SamuLMError) else f"{type(error).__name__}: {text}"


def _log_traceback(error: Exception) -> None:
    text = "".join(traceback.format_exception(error)).rstrip()
    record = log.makeRecord(log.name, logging.ERROR, __file__, 0, text, (), None)
    for handler in logging.getLogger().handlers:  # the file only: the console gets one line, or it from the entry point
        if isinstance(handler, logging.FileHandler):
            with _silent_logging():  # a full disk is what the error may be about
                handler.handle(record)


@contextlib.contextmanager
def _silent_logging() -> Iterator[None]:
    before, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        yield
    finally:
        logging.raiseExceptions = before


def _finish_sweep() -> None:
    if "samu_lm.training.sweep" in sys.modules:  # no sweep without it
        sys.modules["samu_lm.training.sweep"].finish_sweep()


def reword(error: Exception, arguments: list[str], config_name: str) -> str:
    """One of Hydra's or OmegaConf's errors as ``key=value: remedy``.

    Args:
        error: what composing the config raised.
        arguments: the command line without the program.
        config_name: the primary config, to look up the keys that exist.
    """
    text = str(error)
    if isinstance(error, MissingConfigException):
        return _missing_choice(error)
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        return str(ConfigError(key, value, f"cannot be read ({_first_line(text)}); check quotes and brackets"))
    if match := re.match(r"Could not (override|delete from config|append to config)\W+(.*)", text):
        named = re.search(r"'([^']+)'", text)
        return _unknown_key(match[1].split()[0], named[1] if named else match[2], arguments, config_name)
    if isinstance(error, OmegaConfBaseException):
        key = error.full_key or "config"
        return str(ConfigError(key, _value_of(key, arguments), f"{_first_line(text)}; set it to a value that exists"))
    return " ".join(text.split())


def _missing_choice(error: MissingConfigException) -> str:
    match = re.search(r"Could not find '(?:(.*)/)?([^']+)'", str(error))
    if match is None or match[1] is None:
        return str(ConfigError("--config-name", error.missing_cfg_file, "no such config file"))
    options = [str(option) for option in error.options or ()]
    close = difflib.get_close_matches(match[2], options, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return str(ConfigError(match[1], match[2], f"no such choice; {hint}choose from {', '.join(options) or 'none'}"))


def _unknown_key(action: str, key: str, arguments: list[str], config_name: str) -> str:
    value = _value_of(key, arguments)
    if action == "append":
        return str(ConfigError(f"+{key}", value, f"the key exists; drop the plus: {key}={value}"))
    known = _known_keys(arguments, config_name)
    parent, _, name = key.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == parent}
    if close := difflib.get_close_matches(name, siblings, n=1):
        hint = f"did you mean {siblings[close[0]]}?"
    elif elsewhere := [k for k in known if k.rpartition(".")[2] == name]:
        hint = f"did you mean {' or '.join(elsewhere)}?"
    elif close := difflib.get_close_matches(key, known, n=1, cutoff=0.7):
        hint = f"did you mean {close[0]}?"
    elif siblings:
        where = parent or "the config"
        hint = f"{where} has {', '.join(sorted(siblings))}"
    else:
        hint = "there is no such part of the config"
    return str(ConfigError(key, value, f"unknown key; {hint}"))


def _value_of(key: str, arguments: list[str]) -> str:
    for argument in arguments:
        name, equals, value = argument.lstrip("+~").partition("=")
        if equals and name.split("@")[0] == key:
            return value
    return "(nothing)"


def _known_keys(arguments: list[str], config_name: str) -> list[str]:
    """Keys of the config with the command line's group choices, or of the default config where they do not compose."""
    from hydra import compose, initialize_config_dir

    choices = [f"{n}={v.split(',')[0]}" for n, e, v in (a.partition("=") for a in arguments) if e and n.isidentifier()]
    for overrides in (choices, []):
        GlobalHydra.instance().clear()
        try:
            with initialize_config_dir(str(config_dir()), version_base="1.3"):
                cfg = compose(config_name, overrides)
        except (HydraException, OmegaConfBaseException):
            continue
        content = OmegaConf.to_container(cfg, resolve=False)
        return _keys(content) if isinstance(content, dict) else []
    return []


def _keys(node: dict[Any, Any], path: str = "") -> list[str]:
    return [full for key, value in node.items() for full in (f"{path}{key}", *_nested(value, f"{path}{key}."))]


def _nested(value: Any, path: str) -> list[str]:
    return _keys(value, path) if isinstance(value, dict) else []


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0]
