"""Initial weights of a network that is never whole in memory, equal to the bit to those that its constructor draws.

The constructor runs on the device ``meta`` and its operations on tensors are recorded. They are then executed on the
CPU in the same order, so that the random generator goes through the same states, and each weight is handed over as soon
as it is complete. A weight that a later operation draws anew, as after the initialisation of PyTorch's layers, is
drawn and dropped. The constructor may not depend on values, which it does not see (``ModelFamily.draws_on_meta``).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from fastdiff.rng import seed_initial_values

N = TypeVar("N", bound=nn.Module)

_OVERWRITES = {"uniform_", "normal_", "zero_", "fill_", "copy_", "random_", "bernoulli_", "exponential_"}
"""Operations that replace all values of their first argument."""
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Operations whose result has no values yet."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A recorded operation on tensors of the device ``meta``."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any

    @property
    def name(self) -> str:
        return str(self.function.overloadpacket.__name__)

    @property
    def is_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.function.tags

    @property
    def is_view(self) -> bool:
        """Whether the results share the memory of an argument that is not changed."""
        aliases = [value.alias_info for value in self.function._schema.returns]
        return any(alias is not None and not alias.is_write for alias in aliases)

    @property
    def changed(self) -> list[Tensor]:
        """Tensors whose values it sets: arguments that are changed in place, or else its results."""
        given = zip(self.function._schema.arguments, self.args, strict=False)
        inside = [value for argument, value in given if argument.alias_info and argument.alias_info.is_write]
        return _metas(inside) if inside else _metas(self.result)

    @property
    def read(self) -> list[Tensor]:
        return _metas((self.args, dict(self.kwargs)))

    def replaces(self, tensor: Tensor) -> bool:
        """Whether no earlier value of the memory of ``tensor`` counts after it."""
        inside = any(tensor is value for value in _metas(self.args))
        if inside and self.name not in _OVERWRITES:
            return False
        return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        call = _Call(func, args, kwargs or {}, result)
        if not call.is_view and call.name not in _EMPTY and (call.is_random or _metas(call.changed)):
            self.calls.append(call)
        return result


class Deferred(Generic[N]):
    """A network on ``meta`` and its initial weights.

    Args:
        build: constructs the network on torch's default device from its default generator.
        seed: of the generator, in [0, 2**64).
    """

    def __init__(self, build: Callable[[], N], seed: int) -> None:
        recorder = _Recorder()
        with torch.device("meta"), recorder:
            self.network = build()
        self._calls, self._seed = recorder.calls, seed
        # Those of the network are replaced when memory is made for them.
        named = [*self.network.named_parameters(), *self.network.named_buffers()]
        self._wanted = {name: tensor for name, tensor in named if tensor.is_meta}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the value of each parameter and buffer on ``meta``, on the CPU, in order of completion.

        Until the iterator ends, torch's default generator is that of the weights.
        """
        wanted, names = self._wanted, dict[int, list[str]]()
        for name, tensor in wanted.items():
            names.setdefault(_memory(tensor), []).append(name)
        memory: dict[int, Tensor] = {}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            seed_initial_values(self._seed)
            for step in _plan(self._calls, set(names)):
                _execute(step.call, memory)
                for place in step.complete:
                    for name in names.pop(place):
                        yield name, _view(wanted[name], memory[place])
                for place in step.complete | step.dropped:
                    memory.pop(place, None)
        for name in (name for left in names.values() for name in left):  # without an initial value
            yield name, torch.empty_like(wanted[name], device="cpu")


@dataclass(frozen=True, slots=True)
class _Step:
    """A call to execute."""

    call: _Call
    complete: set[int]
    """Memory of weights that have their final value after it."""
    dropped: set[int]
    """Memory whose value nothing needs after it."""


def _plan(calls: list[_Call], wanted: set[int]) -> list[_Step]:
    """Return the calls that draw random numbers or lead to the values of the wanted memory."""
    needed, incomplete = set(wanted), set(wanted)
    plan: list[_Step] = []
    for call in reversed(calls):
        changed = call.changed
        places = {_memory(tensor) for tensor in changed}
        if not places & needed and not call.is_random:
            continue
        others = {_memory(tensor) for tensor in call.read} - places
        complete = (places & needed | others) & incomplete
        incomplete -= complete
        plan.append(_Step(call, complete, (places | others) - needed - complete))
        needed -= {_memory(tensor) for tensor in changed if call.replaces(tensor)}
        needed |= others
    return plan[::-1]


def _execute(call: _Call, memory: dict[int, Tensor]) -> None:
    """Execute a recorded call on the CPU."""

    def real(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_meta:
            place = _memory(value)
            if place not in memory:
                memory[place] = torch.empty(value.untyped_storage().nbytes(), dtype=torch.uint8)
            return _view(value, memory[place])
        return torch.device("cpu") if isinstance(value, torch.device) else value

    results = call.function(*tree_map(real, call.args), **tree_map(real, dict(call.kwargs)))
    inside = _metas(call.args)
    for recorded, found in zip(tree_iter(call.result), tree_iter(results), strict=True):
        if isinstance(recorded, Tensor) and not any(recorded is value for value in inside):
            real(recorded).copy_(found)


def _view(tensor: Tensor, memory: Tensor) -> Tensor:
    """Return the part of ``memory`` (bytes) that ``tensor`` describes."""
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _metas(values: Any) -> list[Tensor]:
    return [value for value in tree_iter(values) if isinstance(value, Tensor) and value.is_meta]
