"""Training with weights, gradients and optimizer states in shards over the ranks (FSDP2, `fully_shard`).

Each residual block is one unit, gathered when it is worked through; embedding and final norm are another. Single
numbers, such as SAMU's amplitudes, cannot be cut: every rank keeps them and their gradients are averaged.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh

from samu_lm.checkpoint import load_plain, sharded
from samu_lm.training.checkpoint_io import CheckpointWriteError, partial_name, shard_folders, sync_folder


def local_part(tensor: Any) -> Tensor:
    """This rank's part of a sharded tensor; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def is_sharded(module: nn.Module) -> bool:
    """Whether a module's parameters lie in shards."""
    return any(hasattr(parameter, "full_tensor") for parameter in module.parameters())


def shard_model(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cuts a language model's parameters over the ranks of a one-dimensional mesh, in place."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    whole = {parameter for parameter in model.parameters() if parameter.dim() == 0}
    blocks: Iterable[nn.Module] = model.blocks  # type: ignore[assignment]
    for block in blocks:
        fully_shard(block, mesh=mesh, ignored_params=whole)
    # The embedding is needed twice, at both ends of the forward pass, so it stays gathered in between.
    fully_shard(model, mesh=mesh, ignored_params=whole, reshard_after_forward=False)
    register_fsdp_forward_method(model, "hidden")


def average_whole_gradients(module: nn.Module) -> None:
    """Averages over the ranks the gradients of those parameters of a sharded module that are not cut."""
    whole = [p.grad for p in module.parameters() if p.dim() == 0 and p.grad is not None]
    if whole:
        together = torch.stack(whole)
        torch.distributed.all_reduce(together)
        together /= torch.distributed.get_world_size()
        for gradient, averaged in zip(whole, together, strict=True):
            gradient.copy_(averaged)


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's `ModelParallelStrategy` over all ranks, with checkpoints in shards that are whole or absent.

    A checkpoint's name is a link to a folder beside it, made when every rank's files are on the disk; the link changes
    from one folder to the next at once, and the folder that no name leads to any more is deleted.
    """

    def __init__(self) -> None:
        super().__init__(save_distributed_checkpoint=True)

    def _setup_distributed(self) -> None:
        super()._setup_distributed()
        self._data_parallel_size, self._tensor_parallel_size = self.world_size, 1

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint into model and optimizer; every rank calls this.

        A folder of shards may come from any number of ranks, a file from any strategy.
        """
        path = Path(self.broadcast(str(checkpoint_path)))
        if sharded.is_sharded(path):
            return super().load_checkpoint(path, weights_only)
        # Lightning would number the optimizer's parameters in the model's order, not in that of the optimizer's groups.
        assert self.model is not None
        content: dict[str, Any] = load_plain(path, "resume")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(self.model, content.pop("state_dict"), options=options)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for optimizer, state in zip(self.optimizers, content["optimizer_states"], strict=True):
            own = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
            set_optimizer_state_dict(self.model, optimizer, sharded.by_name(state, own), options=options)
        return content

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Writes a checkpoint; every rank calls this.

        Raises:
            CheckpointWriteError: on every rank, if any rank cannot write; the checkpoint of that name is unchanged.
        """
        path = Path(self.broadcast(str(filepath)))
        shards = path.with_name(f".{path.name}.{self.broadcast(uuid.uuid4().hex[:12])}")
        states = {"state_dict": checkpoint.pop("state_dict")}
        for number, state in enumerate(checkpoint.pop("optimizer_states", [])):
            states[f"optimizer_{number}"] = state
        first = self.global_rank == 0

        def write_rest() -> dict[str, list[int]]:
            names = [file.name for file in shards.glob(f"__{self.global_rank}_*")]
            if first:
                torch.save(checkpoint, shards / sharded.REST)
                names += [sharded.REST, sharded.SHARD_INDEX]
            return {name: self._flush(shards / name) for name in names}

        self._together(path, shards, lambda: shards.mkdir(parents=True) if first else None)
        self._together(path, shards, lambda: torch.distributed.checkpoint.save(states, checkpoint_id=shards))
        sums = self._together(path, shards, write_rest)
        self._together(path, shards, lambda: self._give_name(path, shards, sums) if first else None)

    @staticmethod
    def _flush(file: Path) -> list[int]:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
        return sharded.checksum(file)

    @staticmethod
    def _give_name(path: Path, shards: Path, sums: list[dict[str, list[int]]]) -> None:
        with sharded.write_checksums(shards, {k: v for own in sums for k, v in own.items()}).open("rb") as file:
            os.fsync(file.fileno())
        sync_folder(shards)
        partial = partial_name(path)
        partial.unlink(missing_ok=True)
        partial.symlink_to(shards.name)
        os.replace(partial, path)
        sync_folder(path.parent)
        for folder in shard_folders(path.parent):
            shutil.rmtree(folder)

    def _together(self, path: Path, shards: Path, work: Callable[[], Any]) -> list[Any]:
        """Every rank's result of a piece of work; an error of one rank is an error of all, so that none waits."""
        problem, result = None, None
        try:
            result = work()
        except (OSError, RuntimeError, CheckpointException) as error:
            problem = getattr(error, "strerror", None) or str(error).strip().splitlines()[-1]
        outcomes: list[Any] = [(problem, result)] * self.world_size
        if self.world_size > 1:
            torch.distributed.all_gather_object(outcomes, (problem, result))
        problems = [(rank, found) for rank, (found, _) in enumerate(outcomes) if found]
        if problems:
            if self.global_rank == 0:
                shutil.rmtree(shards, ignore_errors=True)
            rank, reason = problems[0]
            kept = "; the previous one is unchanged" if path.exists() else ""
            raise CheckpointWriteError(
                f"checkpoint={path}: rank {rank} cannot write it ({reason}){kept}; free space or choose another "
                "hydra.run.dir"
            )
        return [result for _, result in outcomes]
