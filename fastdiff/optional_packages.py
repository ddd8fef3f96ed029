"""Requirements of the packages that only some features need, and the pip command that installs them.

The command names the packages themselves, never this project: on a package index, its name may belong to a stranger.
The extras of ``pyproject.toml`` hold the same requirements.
"""

_REQUIREMENTS = {
    "aiohttp": "aiohttp>=3.11",
    "datasets": "datasets>=4",
    "jinja2": "jinja2>=3.1",
    "matplotlib": "matplotlib>=3.10",
    "nvidia-dali-cuda120": "nvidia-dali-cuda120>=2.4,<3",
    "nvidia-dali-cuda130": "nvidia-dali-cuda130>=2.4,<3",
    "peft": "peft>=0.18,<1",
    "psutil": "psutil>=6",
    "s3fs": "s3fs>=2025.3",
    "trackio": "trackio>=0.40",
    "wandb": "wandb>=0.20",
    "xformers": "xformers>=0.0.35,<0.0.36",
}
_OF_CUDA = {
    12: ("torch>=2.10,<2.11", _REQUIREMENTS["nvidia-dali-cuda120"], _REQUIREMENTS["xformers"]),
    13: ("torch>=2.11,<2.16", _REQUIREMENTS["nvidia-dali-cuda130"]),
}
CUDA_VERSIONS = frozenset(_OF_CUDA)
"""Major versions of CUDA with a set of packages."""


def pip_install(*packages: str) -> str:
    """Return the command that installs packages in the tested versions, for example ``pip install 'peft>=0.18,<1'``."""
    return _command(*(_REQUIREMENTS[package] for package in packages))


def pip_install_for_cuda(version: int) -> str:
    """Return the command that installs torch and what is built for a version of CUDA, one of ``CUDA_VERSIONS``."""
    return _command(*_OF_CUDA[version])


def _command(*requirements: str) -> str:
    return " ".join(["pip install", *(f"'{each}'" for each in requirements)])
