"""An adapter that starts from a published file: its configuration, and its first values."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from fastdiff.config.networks.pretrained import LoraConfig
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.errors import require
from fastdiff.models.adapter_files.forms import Change
from fastdiff.models.adapter_files.native_names import NamedNetwork, named_network
from fastdiff.models.adapter_files.published import named, read_adapter
from fastdiff.models.adapter_kinds.kinds import kind_of
from fastdiff.models.build import Model
from fastdiff.models.lora import adapted_layers, end_of, lora_targets


def with_values_of_file(config: LoraConfig, model: ModelConfig) -> LoraConfig:
    """Return the configuration with the layers and alpha of its file, where it names none.

    Raises:
        ConfigError: the file cannot be read, is of another network, has a layer of a higher rank, or one that is not
            among the targets.
    """
    if not config.init:
        return config
    network = named_network(model)
    changes = read_adapter(Path(config.init), network, kind_of(config), skip_text_encoders=config.skip_text_encoders)
    config = kind_of(config).fitted(config, changes, network.layers)
    found = replace(config, targets=config.targets or _targets(changes, network))
    _check(found, changes, network, model)
    scales = {change.scale for change in changes.values()}
    of_file = scales.pop() * config.rank if len(scales) == 1 and min(scales, default=1) > 0 else None
    return replace(found, alpha=of_file if config.alpha is None else config.alpha)


def start_from_file(model: Model, config: LoraConfig, network: NamedNetwork) -> None:
    """Give an adapter the values of its file, in place: every layer changes as the file says.

    A layer that the file lacks, and rows of A above the rank of the file, keep the values that were drawn; B is 0
    there. If the file has another scale than the run, one matrix (of a LoRA B) has the quotient.

    Args:
        model: with a fresh adapter, see ``models.lora.add_lora``.
        config: of the adapter, see ``with_values_of_file``.
        network: names of the layers of ``model``.
    """
    changes = read_adapter(Path(config.init), network, kind_of(config), skip_text_encoders=config.skip_text_encoders)
    _check(config, changes, network, model.config)
    kind, parameters = kind_of(config), dict(model.named_parameters())
    for layer, change in changes.items():
        kind.start(kind.of_layer(parameters, layer), change, config)


def _targets(changes: Collection[str], network: NamedNetwork) -> tuple[str, ...]:
    """Return the fewest ends of names that are those of these layers alone, or all names."""
    ends = sorted({end_of(layer) for layer in changes})
    return tuple(ends) if set(adapted_layers(network.layers, ends)) == set(changes) else tuple(sorted(changes))


def _check(config: LoraConfig, changes: Mapping[str, Change], network: NamedNetwork, model: ModelConfig) -> None:
    adapted = set(adapted_layers(network.layers, lora_targets(config, model)))
    others = [layer for layer in changes if layer not in adapted]
    require(
        not others,
        f"--lora.init {config.init}: {len(others)} of its {len(changes)} layers are not among --lora.targets "
        f"{' '.join(config.targets)}: {named(others)}; leave --lora.targets out, which takes those of the file",
    )
    above = {layer: change.rank for layer, change in changes.items() if change.rank > config.rank}
    require(
        not above,
        f"--lora.init {config.init}: {len(above)} of its {len(changes)} layers have a rank above --lora.rank "
        f"{config.rank}: {named(list(above))}; use --lora.rank {max(above.values(), default=0)}",
    )
