"""A Kubernetes manifest: an Indexed Job with one pod per node, and a headless Service that resolves node 0."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fastdiff.cluster.launchers.job import SUPERVISOR, Job, require_name
from fastdiff.errors import ConfigError, DataError, DivergedError, Preempted, StorageError

_PORT = 29500
_LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_LABEL_WORDS = "lower-case letters, digits and dashes, a letter or a digit at both ends"
_FINAL = (ConfigError.exit_code, DataError.exit_code, DivergedError.exit_code, StorageError.exit_code)
"""Exit codes of errors that a restart would repeat."""
_RESTARTS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Pods:
    """The settings of the Kubernetes job.

    Raises:
        ConfigError: Kubernetes would not accept a value.
    """

    name: str
    image: str
    """Container image with fastdiff installed."""
    namespace: str | None = None
    volumes: Mapping[str, str] = field(default_factory=dict)
    """Mount paths of the persistent volume claims, by claim."""
    grace_s: int = 120
    """Seconds between the request to stop and the kill, for the save."""

    def __post_init__(self) -> None:
        # The pods are called NAME-INDEX, a DNS label: at most 63 characters.
        require_name(
            "--name", self.name, r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", f"a letter first, {_LABEL_WORDS}, up to 52"
        )
        require_name("--image", self.image, r"[a-z0-9][A-Za-z0-9._:/@-]*", "an image such as registry/name:tag")
        if self.namespace is not None:
            require_name("--namespace", self.namespace, rf"(?=.{{1,63}}$){_LABEL}", f"{_LABEL_WORDS}, up to 63")
        for claim, mount in self.volumes.items():
            require_name(
                "--pvc", claim, rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*", f"CLAIM:/PATH, CLAIM of {_LABEL_WORDS}"
            )
            # The whole value: a part of an address is not recognised as one, and its password would be shown.
            value, pattern = f"{claim}:{mount}", r"[^:]*:/[^\x00-\x1f\x7f:]*"
            require_name("--pvc", value, pattern, "CLAIM:/PATH, an absolute path without colons")
        if len(set(self.volumes.values())) != len(self.volumes):
            raise ConfigError("--pvc: two claims at the same path; give each its own")


def manifest(job: Job, pods: Pods) -> str:
    """Return the manifest as YAML."""
    return yaml.safe_dump_all([_service(pods), _job(job, pods)], sort_keys=False)


def _metadata(pods: Pods) -> dict[str, Any]:
    return {"name": pods.name, **({"namespace": pods.namespace} if pods.namespace else {})}


def _service(pods: Pods) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(pods),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": pods.name},
        },
    }


def _job(job: Job, pods: Pods) -> dict[str, Any]:
    def rule(action: str, codes: list[int]) -> dict[str, Any]:
        return {
            "action": action,
            "onExitCodes": {"containerName": "fastdiff", "operator": "In", "values": sorted(codes)},
        }

    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(pods),
        "spec": {
            "completionMode": "Indexed",
            "completions": job.nodes,
            "parallelism": job.nodes,
            # When one pod fails, all fail.
            "backoffLimit": _RESTARTS * job.nodes,
            "podFailurePolicy": {
                "rules": [
                    rule("Ignore", [Preempted.exit_code]),
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    rule("FailJob", list(_FINAL)),
                ]
            },
            "template": {"spec": _pod(job, pods)},
        },
    }


def _pod(job: Job, pods: Pods) -> dict[str, Any]:
    mounts = [{"name": f"volume-{i}", "mountPath": mount} for i, mount in enumerate(pods.volumes.values())]
    claims = [
        {"name": f"volume-{i}", "persistentVolumeClaim": {"claimName": claim}} for i, claim in enumerate(pods.volumes)
    ]
    # Kubernetes replaces $(NAME) in arguments; $$ stands for a dollar sign.
    arguments = [word.replace("$", "$$") for word in job.arguments(f"{pods.name}-0.{pods.name}", _PORT)]
    return {
        "subdomain": pods.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": pods.grace_s,
        "containers": [
            {
                "name": "fastdiff",
                "image": pods.image,
                "command": ["python", "-u", "-m", SUPERVISOR],
                "args": ["--node-rank", "$(JOB_COMPLETION_INDEX)", *arguments],
                "resources": {"limits": {"nvidia.com/gpu": str(job.ranks_per_node)}},
                "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}, *mounts],
            }
        ],
        # Ranks of one node communicate through shared memory; a container has 64 MiB by default.
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}, *claims],
    }


def submit(path: Path) -> str:
    """Pass a manifest to ``kubectl apply`` and return its output.

    Raises:
        ConfigError: kubectl is missing or refuses the manifest.
    """
    try:
        done = subprocess.run(["kubectl", "apply", "-f", str(path)], capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        raise ConfigError(f"kubectl is missing on this machine; copy {path} to one that has it") from None
    except subprocess.TimeoutExpired:
        raise ConfigError("kubectl did not answer within 120 s; is the cluster reachable?") from None
    if done.returncode:
        raise ConfigError(f"kubectl refuses {path}: {done.stderr.strip()}")
    return done.stdout.strip()
