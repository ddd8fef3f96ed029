"""Transport of SiT and of REPA: their names for the objective, which their trainings record.

The weights of both have the names and shapes of a DiT's. Only ``args`` in the files of a training tell them apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastdiff.config.sections.objective import FlowConfig, FlowConvention, FlowPath, ObjectiveConfig, Prediction
from fastdiff.errors import ConfigError
from fastdiff.models.pretrained.pickles import read_arguments


@dataclass(frozen=True, slots=True)
class Transport:
    """Names of one code base for a path and a prediction."""

    owner: str
    paths: Mapping[FlowPath, str]
    """Its ``path_type`` of each path."""
    predictions: Mapping[Prediction, str]
    """Its ``prediction`` of each prediction."""
    sampler: str = ""
    """Call that makes its sampler for a network that returns a tensor; empty: it has none."""

    def names(self, objective: FlowConfig) -> dict[str, str]:
        """Return ``path_type`` and ``prediction`` of the objective; empty if the code has no such training."""
        path, prediction = self.paths.get(objective.path), self.predictions.get(objective.predicted)
        return {} if path is None or prediction is None else {"path_type": path, "prediction": prediction}


TRANSPORTS: Mapping[FlowConvention, Transport] = {
    "sit": Transport(
        "SiT",
        {"linear": "Linear", "gvp": "GVP", "vp": "VP"},
        {"flow": "velocity", "epsilon": "noise", "score": "score"},
        'create_transport("{path_type}", "{prediction}")',
    ),
    "repa": Transport("REPA", {"linear": "linear", "gvp": "cosine"}, {"flow": "v"}),
}
"""Ma et al. 2024 (arXiv:2401.08740) and Yu et al. 2024 (arXiv:2410.06940), by the convention of their networks."""


def transport(objective: ObjectiveConfig) -> dict[str, str]:
    """Return ``path_type`` and ``prediction`` of the equivalent training of the convention's code; empty: none."""
    if not isinstance(objective, FlowConfig) or objective.convention not in TRANSPORTS:
        return {}
    return TRANSPORTS[objective.convention].names(objective)


def sampler(objective: ObjectiveConfig) -> str:
    """Say in Markdown which published sampler can use a network of this objective; empty: none."""
    if not isinstance(objective, FlowConfig) or not (names := transport(objective)):
        return ""
    known = TRANSPORTS[objective.convention]
    return f"that of {known.owner} can: `{known.sampler.format(**names)}`" if known.sampler else ""


def check_transport(path: Path, objective: ObjectiveConfig) -> None:
    """Compare the objective with the transport in the ``.pt`` file of a training, if the file names one.

    Args:
        path: the file; no code in it is run.
        objective: of the network that gets the weights.

    Raises:
        ConfigError: the weights were trained with another path, prediction or convention of time.
        ValueError: unexpected or hostile file.
        OSError: the file cannot be read.
    """
    names = "path_type", "prediction"
    theirs = {name: value for name, value in read_arguments(path).items() if name in names and isinstance(value, str)}
    if theirs.items() <= transport(objective).items():
        return
    convention = _convention(theirs)
    raise ConfigError(
        f"{path} was trained by {TRANSPORTS[convention].owner} with {_in_words(theirs)}, given {_flags(objective)}; "
        f"{_remedy(theirs, convention)}"
    )


def _convention(theirs: dict[str, str]) -> FlowConvention:
    """Return the convention of the code with these names; that of SiT if no code has them."""
    for convention, known in TRANSPORTS.items():
        own = {*known.paths.values(), *known.predictions.values()}
        if own.issuperset(theirs.values()):
            return convention
    return "sit"


def _in_words(arguments: dict[str, str]) -> str:
    return " and ".join(f"{name} {value:.40}" for name, value in sorted(arguments.items()))


def _flags(objective: ObjectiveConfig) -> str:
    flags: dict[str, str] = {"process": objective.process, "prediction": objective.predicted}
    if isinstance(objective, FlowConfig):
        flags |= {"convention": objective.convention, "path": objective.path}
    return " ".join(f"--objective.{name} {value}" for name, value in flags.items())


def _remedy(theirs: dict[str, str], convention: FlowConvention) -> str:
    code = TRANSPORTS[convention]
    flags = [f"--objective.process flow --objective.convention {convention}"]
    for name, flag, known in (("path_type", "path", code.paths), ("prediction", "prediction", code.predictions)):
        if name not in theirs:
            continue
        ours: dict[str, str] = {value: key for key, value in known.items()}
        if theirs[name] not in ours:
            return f"{code.owner} has the {name.replace('_', ' ')}s {', '.join(ours)}"
        flags.append(f"--objective.{flag} {ours[theirs[name]]}")
    return f"set {' '.join(flags)}"
