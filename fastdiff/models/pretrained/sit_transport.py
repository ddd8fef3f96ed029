"""Transport of SiT (Ma et al. 2024, arXiv:2401.08740): its names for the objective, which its trainings record.

The weights of a SiT have the names and shapes of a DiT's. Only ``args`` in the files of a training tell them apart.
"""

from pathlib import Path

from fastdiff.config.sections.objective import FlowConfig, ObjectiveConfig
from fastdiff.errors import ConfigError
from fastdiff.models.pretrained.pickles import read_arguments

PATH_TYPES = {"linear": "Linear", "gvp": "GVP", "vp": "VP"}
"""SiT's ``path_type`` of each path."""
PREDICTIONS = {"flow": "velocity", "epsilon": "noise", "score": "score"}
"""SiT's ``prediction`` of each prediction."""


def transport(objective: ObjectiveConfig) -> dict[str, str]:
    """Return ``path_type`` and ``prediction`` of the equivalent transport; empty if SiT has none."""
    if not isinstance(objective, FlowConfig) or objective.convention != "sit":
        return {}
    return {"path_type": PATH_TYPES[objective.path], "prediction": PREDICTIONS[objective.predicted]}


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
    raise ConfigError(
        f"{path} was trained by SiT with {_in_words(theirs)}, given {_flags(objective)}; {_remedy(theirs)}"
    )


def _in_words(arguments: dict[str, str]) -> str:
    return " and ".join(f"{name} {value:.40}" for name, value in sorted(arguments.items()))


def _flags(objective: ObjectiveConfig) -> str:
    flags: dict[str, str] = {"process": objective.process, "prediction": objective.predicted}
    if isinstance(objective, FlowConfig):
        flags |= {"convention": objective.convention, "path": objective.path}
    return " ".join(f"--objective.{name} {value}" for name, value in flags.items())


def _remedy(theirs: dict[str, str]) -> str:
    flags = ["--objective.process flow --objective.convention sit"]
    for name, flag, known in (("path_type", "path", PATH_TYPES), ("prediction", "prediction", PREDICTIONS)):
        if name not in theirs:
            continue
        ours = {value: key for key, value in known.items()}
        if theirs[name] not in ours:
            return f"SiT has the {name.replace('_', ' ')}s {', '.join(ours)}"
        flags.append(f"--objective.{flag} {ours[theirs[name]]}")
    return f"set {' '.join(flags)}"
