"""A job as manifests: a JobSet, or a PyTorchJob of Kubeflow's training operator. torchrun starts the ranks of each pod.

Fields: jobset.x-k8s.io/v1alpha2 and kubeflow.org/v1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from stretto.errors import JobError
from stretto.job import Job
from stretto.keys import nearest
from stretto.launch.placing import Placing

PORT = 29500
RUNS, GIVEN = "/runs", "/job"  # where a pod finds the volume and the job's file


class Pods(NamedTuple):
    """What pods need. image: with stretto in it. claim: a PersistentVolumeClaim that all nodes can write; None: nothing is kept."""

    image: str
    claim: str | None


def manifest(job: Job, place: Placing, pods: Pods, kinds: Sequence[str]) -> str:
    """The documents, one a kind, with the job in a ConfigMap of each. job: not resolved, so that pods find their own devices."""
    for kind in kinds:
        if kind not in KINDS:
            raise JobError(f"--kind {kind}: there are {', '.join(KINDS)}; write --kind {nearest(kind, KINDS) or 'jobset'}")
    lines = ["# stretto train --on kubernetes; kubectl apply -f FILE\n"]
    if len(kinds) > 1:
        lines.append("# Two ways to run one job: apply the one whose operator your cluster has (--kind jobset prints it alone).\n")
    if pods.claim is None:
        lines.append("# Without --claim NAME (a volume that all nodes can write) checkpoints and logs go with the pods.\n")
    for kind in kinds:
        name = f"{_name(job.name)}-{kind}"
        config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"job.toml": job.to_toml(comments=False)}}
        lines += ["---\n", text(config), "---\n", text(KINDS[kind](name, place, pods))]
    return "".join(lines)


def _job_set(name: str, place: Placing, pods: Pods) -> Mapping[str, Any]:
    """Its pods are called by name and number, so each knows where the first is."""
    meet = ["--nnodes", str(place.nodes), "--node-rank", "$(JOB_COMPLETION_INDEX)", "--nproc-per-node", str(place.per_node)]
    meet += ["--master-addr", f"{name}-ranks-0-0.{name}", "--master-port", str(PORT)]
    spec = _pod(name, place, pods, meet, "Never")
    worker = {
        "parallelism": place.nodes,
        "completions": place.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": spec},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {"failurePolicy": {"maxRestarts": 3}, "replicatedJobs": [{"name": "ranks", "replicas": 1, "template": {"spec": worker}}]},
    }


def _pytorch_job(name: str, place: Placing, pods: Pods) -> Mapping[str, Any]:
    """The operator tells torchrun by PET_ variables how many nodes there are and where they meet."""
    spec = _pod(name, place, pods, [], None)
    replicas = {"Master": 1, "Worker": place.nodes - 1}
    template = {"restartPolicy": "OnFailure", "template": {"spec": spec}}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {
            "nprocPerNode": str(place.per_node),
            "pytorchReplicaSpecs": {role: {"replicas": count, **template} for role, count in replicas.items() if count},
        },
    }


KINDS: Mapping[str, Callable[[str, Placing, Pods], Mapping[str, Any]]] = MappingProxyType({"jobset": _job_set, "pytorchjob": _pytorch_job})


def _pod(name: str, place: Placing, pods: Pods, meet: Sequence[str], restart: str | None) -> dict[str, Any]:
    train = ["train", f"{GIVEN}/job.toml", "--out", f"{RUNS}/{name}", "--resume=auto"]
    container: dict[str, Any] = {
        "name": "pytorch",  # the operator looks for a container of this name
        "image": pods.image,
        "command": ["torchrun", *meet, "-m", "stretto", *train],
        "workingDir": RUNS,
        "ports": [{"containerPort": PORT}],
        "env": [{"name": "PYTHONUNBUFFERED", "value": "1"}],
        "volumeMounts": [
            {"name": "job", "mountPath": GIVEN},
            {"name": "runs", "mountPath": RUNS},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    if place.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": place.per_node}}
    kept: dict[str, Any] = {"persistentVolumeClaim": {"claimName": pods.claim}} if pods.claim else {"emptyDir": {}}
    volumes = [
        {"name": "job", "configMap": {"name": name}},
        {"name": "runs", **kept},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # NCCL's own: 64 MB is too little
    ]
    grace = {"terminationGracePeriodSeconds": 120}  # SIGTERM asks ranks to save
    return {**({"restartPolicy": restart} if restart else {}), **grace, "containers": [container], "volumes": volumes}


def _name(text: str) -> str:
    """As Kubernetes allows names: small letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40] or "job"


def text(value: object, indent: str = "") -> str:
    """YAML. Numbers and texts are written as JSON, which YAML reads alike; texts of several lines as a block."""
    if isinstance(value, Mapping):
        return "".join(f"{indent}{key}:{_under(inner, indent)}" for key, inner in value.items())
    if isinstance(value, list):
        parts = [text(item, indent + "  ") if isinstance(item, Mapping) else f"{indent}  {json.dumps(item)}\n" for item in value]
        return "".join(f"{indent}- {part[len(indent) + 2 :]}" for part in parts)
    return f"{indent}{json.dumps(value)}\n"


def _under(value: object, indent: str) -> str:
    """What stands behind a key."""
    if isinstance(value, Mapping | list) and value:
        return "\n" + text(value, indent + "  ")
    if isinstance(value, str) and "\n" in value:
        return " |\n" + "".join(f"{indent}  {line}".rstrip() + "\n" for line in value.splitlines())
    return f" {json.dumps(value)}\n"
