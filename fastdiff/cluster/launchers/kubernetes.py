"""A Kubernetes manifest: an Indexed Job with one pod per node, and a headless Service that resolves node 0."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fastdiff.cluster.launchers.job import SUPERVISOR, Job, passed, require_name
from fastdiff.errors import ConfigError, DataError, DivergedError, Preempted, StorageError

_PORT = 29500
_LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_SUBDOMAIN = rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*"
_KEY = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,252}"
_VALUE = r"[A-Za-z0-9]?[A-Za-z0-9._-]{0,62}"
_TAINT = rf"({_KEY})(?:=({_VALUE}))?(?::(NoSchedule|PreferNoSchedule|NoExecute))?"
_LABEL_WORDS = "lower-case letters, digits and dashes, a letter or a digit at both ends"
_FINAL = (ConfigError.exit_code, DataError.exit_code, DivergedError.exit_code, StorageError.exit_code)
"""Exit codes of errors that a restart would repeat."""
_RESTARTS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Pods:
    """The settings of the Kubernetes job; ConfigError if Kubernetes would not accept a value."""

    name: str
    image: str
    """Container image with fastdiff installed."""
    namespace: str | None = None
    volumes: Mapping[str, str] = field(default_factory=dict)
    """Mount paths of the persistent volume claims, by claim."""
    gpus: int | None = None
    """GPUs per pod; None: one per rank."""
    cores: int = 0
    """Cores to ask for per pod; 0: none."""
    memory_gib: int = 0
    """Memory to ask for per pod; 0: none."""
    secrets: tuple[str, ...] = ()
    """Secrets whose keys become environment variables; their values never pass through fastdiff."""
    tolerations: tuple[str, ...] = ()
    """Taints of nodes to tolerate, as ``KEY[=VALUE][:EFFECT]``."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    """Labels that the nodes must have."""
    user: int = 1000
    """User and group of the processes and of new files on the volumes; 0: that of the image, also root."""
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
            require_name("--pvc", claim, _SUBDOMAIN, f"CLAIM:/PATH, CLAIM of {_LABEL_WORDS}")
            # The whole value: a part of an address is not recognised as one, and its password would be shown.
            value, pattern = f"{claim}:{mount}", r"[^:]*:/[^\x00-\x1f\x7f:]*"
            require_name("--pvc", value, pattern, "CLAIM:/PATH, an absolute path without colons")
        for secret in self.secrets:
            require_name("--secret", secret, _SUBDOMAIN, f"the name of a Secret: {_LABEL_WORDS}")
        for taint in self.tolerations:
            require_name("--toleration", taint, _TAINT, "KEY[=VALUE][:EFFECT], for example nvidia.com/gpu:NoSchedule")
        for key, value in self.node_selector.items():
            require_name("--node-selector", f"{key}={value}", rf"{_KEY}={_VALUE}", "KEY=VALUE, a label of nodes")
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
        **_placement(pods),
        "containers": [
            {
                "name": "fastdiff",
                "image": pods.image,
                "command": ["python", "-u", "-m", SUPERVISOR],
                "args": ["--node-rank", "$(JOB_COMPLETION_INDEX)", *arguments],
                "resources": _resources(job, pods),
                **_variables(pods),
                **({"securityContext": _UNPRIVILEGED} if pods.user else {}),
                "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}, *mounts],
            }
        ],
        # Ranks of one node communicate through shared memory; a container has 64 MiB by default.
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}, *claims],
    }


_UNPRIVILEGED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _resources(job: Job, pods: Pods) -> dict[str, Any]:
    """Return what a pod asks for. Only GPUs are limited: a limit of memory would kill ranks that load their weights."""
    gpus = job.ranks_per_node if pods.gpus is None else pods.gpus
    requests = {
        **({"cpu": str(pods.cores)} if pods.cores else {}),
        **({"memory": f"{pods.memory_gib}Gi"} if pods.memory_gib else {}),
    }
    return {
        **({"limits": {"nvidia.com/gpu": str(gpus)}} if gpus else {}),
        **({"requests": requests} if requests else {}),
    }


def _variables(pods: Pods) -> dict[str, Any]:
    """Return the environment: of the Secrets, and for a user whom the image does not know, who has no home."""
    home = [{"name": "HOME", "value": "/tmp"}, {"name": "USER", "value": "fastdiff"}]
    return {
        **({"env": home} if pods.user else {}),
        **({"envFrom": [{"secretRef": {"name": name}} for name in pods.secrets]} if pods.secrets else {}),
    }


def _placement(pods: Pods) -> dict[str, Any]:
    """Return where the pod may run, and as whom."""
    user = {
        "runAsNonRoot": True,
        "runAsUser": pods.user,
        "runAsGroup": pods.user,
        "fsGroup": pods.user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    return {
        **({"securityContext": user} if pods.user else {}),
        **({"nodeSelector": dict(pods.node_selector)} if pods.node_selector else {}),
        **({"tolerations": [_toleration(taint) for taint in pods.tolerations]} if pods.tolerations else {}),
    }


def _toleration(taint: str) -> dict[str, str]:
    found = re.fullmatch(_TAINT, taint, re.ASCII)
    assert found is not None  # checked by Pods
    key, value, effect = found.groups()
    return {
        "key": key,
        **({"operator": "Exists"} if value is None else {"operator": "Equal", "value": value}),
        **({"effect": effect} if effect else {}),
    }


def submit(path: Path) -> str:
    """Pass a manifest to ``kubectl apply``, return its output; ConfigError if kubectl is missing or refuses it."""
    return passed(path, ["kubectl", "apply", "-f"], "is the cluster reachable?")
