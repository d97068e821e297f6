"""kubernetes/: by Kubernetes' own schemas, by what we know of KubeRay's, and by our rules."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import ray
import yaml

import m3pc
from m3pc.ray_nodes.connection import SETTINGS
from m3pc.ray_nodes.ports import node_ports
from tests.deployment.deploy_files import (
    DELETED,
    ROOT,
    changed,
    kubernetes_findings,
    load,
    load_all,
)

VERSION = "1.31"
SCHEMA = json.loads((Path(__file__).parent / "kuberay_schema.json").read_text())
FOREIGN = {"RayCluster", "RayJob", "PodMonitor"}  # kinds that Kubernetes itself does not know


def listed(folder: str) -> list[Any]:
    """The documents that a kustomization names."""
    names = load(f"{folder}/kustomization.yaml")["resources"]
    return load_all(*(f"{folder}/{name}" for name in names if name != ".."))


BASE = listed("kubernetes")
JOB = listed("kubernetes/job")
ALL = [*BASE, *JOB]


def place(kind: str, name: str = "") -> int:
    numbers = (n for n, d in enumerate(BASE) if d["kind"] == kind and name in d["metadata"]["name"])
    return next(numbers)


CLUSTER = BASE[place("RayCluster")]


def with_job() -> list[Any]:
    """What the second kustomization makes of the first: its patches applied, its files added."""
    documents = json.loads(json.dumps(ALL))
    cluster = documents[place("RayCluster")]
    for patch in load("kubernetes/job/kustomization.yaml")["patches"]:
        assert patch["target"] == {"kind": "RayCluster", "name": cluster["metadata"]["name"]}
        for change in yaml.safe_load(patch["patch"]):
            *parents, last = change["path"].removeprefix("/").split("/")
            spot = cluster
            for key in parents:
                spot = spot[int(key)] if isinstance(spot, list) else spot[key]
            if last == "-":
                spot.append(change["value"])
            else:
                assert change["op"] == "replace" and last in spot
                spot[last] = change["value"]
    return list(documents)


def test_every_file_is_listed() -> None:
    for folder in ("kubernetes", "kubernetes/job"):
        kustomization = load(f"{folder}/kustomization.yaml")
        named = {*kustomization["resources"], *kustomization.get("configurations", [])} - {".."}
        there = {path.name for path in (ROOT / folder).glob("*.yaml")}
        assert there == named | {"kustomization.yaml"}


@pytest.mark.parametrize(
    "document", [d for d in ALL if d["kind"] not in FOREIGN], ids=lambda d: d["metadata"]["name"]
)
def test_kubernetes_own_schema_accepts_it(document: Any) -> None:
    kubernetes_validate.validate(document, VERSION, strict=True)


def _pod_templates(cluster: Any) -> dict[str, Any]:
    spec = cluster["spec"]
    given = {"head": spec["headGroupSpec"]["template"]}
    given |= {group["groupName"]: group["template"] for group in spec["workerGroupSpecs"]}
    extra = spec["autoscalerOptions"]
    fields = ("env", "resources", "securityContext", "volumeMounts", "imagePullPolicy")
    container = {"name": "autoscaler"} | {key: extra[key] for key in fields}
    return given | {"autoscaler": {"spec": {"containers": [container]}}}


def _as_core(template: Any) -> Any:
    return {
        "apiVersion": "v1",
        "kind": "PodTemplate",
        "metadata": {"name": "t"},
        "template": template,
    }


@pytest.mark.parametrize("name", _pod_templates(CLUSTER))
def test_kubernetes_own_schema_accepts_the_pods_of_the_cluster(name: str) -> None:
    kubernetes_validate.validate(_as_core(_pod_templates(CLUSTER)[name]), VERSION, strict=True)


def test_kubernetes_own_schema_refuses_a_misspelt_key() -> None:
    path = ("spec", "containers", 0, "securityContxt")
    broken = changed(_pod_templates(CLUSTER)["head"], path, {})
    with pytest.raises(kubernetes_validate.ValidationError, match="securityContxt"):
        kubernetes_validate.validate(_as_core(broken), VERSION, strict=True)


@pytest.mark.parametrize("document", [d for d in with_job() if d["kind"].startswith("Ray")])
def test_our_schema_of_kuberay_accepts_it(document: Any) -> None:
    jsonschema.validate(document, SCHEMA)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "authOptions", "mode"), "tokens"),
        (("spec", "enableInTreeAutoscaler"), True),
        (("spec", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
        (("spec", "workerGroupSpecs", 0, "maxReplicas"), DELETED),
        (("spec", "gcsFaultToleranceOptions", "redisPassword"), {}),
        (("apiVersion",), "ray.io/v1alpha1"),
    ],
)
def test_our_schema_of_kuberay_refuses_a_mistake(path: Sequence[str | int], value: Any) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(changed(CLUSTER, path, value), SCHEMA)


def test_the_shipped_files_have_no_findings() -> None:
    assert kubernetes_findings(BASE) == []
    assert kubernetes_findings(with_job()) == []


def test_the_jobs_dashboard_is_on_the_pods_address_and_only_with_its_policy() -> None:
    documents = with_job()
    head = documents[place("RayCluster")]["spec"]["headGroupSpec"]
    assert head["rayStartParams"]["dashboard-host"] == "$(POD_IP)"
    assert "POD_IP" in [item["name"] for item in head["template"]["spec"]["containers"][0]["env"]]
    alone = [d for d in documents if d["metadata"]["name"] != "operator"]
    assert kubernetes_findings(alone) == [
        "the dashboard listens on '$(POD_IP)', where outsiders can submit jobs"
    ]


def _pod(group: str | int, *path: str | int) -> tuple[str | int, ...]:
    where = ("headGroupSpec",) if group == "head" else ("workerGroupSpecs", group)
    return (place("RayCluster"), "spec", *where, "template", *path)


def _container(group: str | int, *path: str | int) -> tuple[str | int, ...]:
    return _pod(group, "spec", "containers", 0, *path)


def _spec(*path: str | int) -> tuple[str | int, ...]:
    return (place("RayCluster"), "spec", *path)


def _redis(*path: str | int) -> tuple[str | int, ...]:
    return (place("StatefulSet"), "spec", "template", "spec", *path)


def _policy(name: str, *path: str | int) -> tuple[str | int, ...]:
    return (place("NetworkPolicy", name), "spec", *path)


def _locked(group: str | int, *path: str | int) -> tuple[str | int, ...]:
    return _container(group, "securityContext", *path)


DASHBOARD = _spec("headGroupSpec", "rayStartParams", "dashboard-host")
CLAIM = (place("PersistentVolumeClaim"), "spec", "accessModes")
PASSWORD = _spec("gcsFaultToleranceOptions", "redisPassword")
LABELS = (place("Namespace"), "metadata", "labels")
DENY, RAY = place("NetworkPolicy", "default-deny"), place("NetworkPolicy", "ray")
HOST = {"name": "h", "hostPath": {"path": "/"}}
PLAIN = {"name": "M3PC_COORDINATOR", "value": "x"}
WORLD = {"ipBlock": {"cidr": "0.0.0.0/0"}}
# fmt: off
MUTANTS: list[tuple[str, Sequence[str | int], Any]] = [
    ("dashboard listens on '0.0.0.0'", DASHBOARD, "0.0.0.0"),
    ("dashboard listens on '::'", DASHBOARD, "::"),
    ("dashboard listens on None", DASHBOARD, DELETED),  # KubeRay then opens it
    ("makes no token", _spec("authOptions"), DELETED),
    ("makes no token", _spec("authOptions", "mode"), "disabled"),
    ("actor: Ray asks for no token", _container(0, "env", 1, "value"), "disabled"),
    ("offered to the world", _spec("headGroupSpec", "serviceType"), "LoadBalancer"),
    ("offered to the world", _spec("headGroupSpec", "enableIngress"), True),
    ("password is not from a Secret", PASSWORD, {"value": "x"}),
    ("M3PC_COORDINATOR is written", _container(1, "env", 2), PLAIN),
    ("head: the pod may run as root", _pod("head", "spec", "securityContext"), {"runAsUser": 1}),
    ("actor: the pod may run as root", _pod(0, "spec", "securityContext", "runAsUser"), 0),
    ("runAsNonRoot is None", _locked(0, "runAsNonRoot"), DELETED),
    ("readOnlyRootFilesystem is False", _locked("head", "readOnlyRootFilesystem"), False),
    ("allowPrivilegeEscalation is None", _locked(1, "allowPrivilegeEscalation"), DELETED),
    ("capabilities is", _locked(0, "capabilities"), {"add": ["SYS_PTRACE"]}),
    ("seccompProfile is", _locked(0, "seccompProfile", "type"), "Unconfined"),
    ("privileged", _locked(0, "privileged"), True),
    ("autoscaler: runAsNonRoot", _spec("autoscalerOptions", "securityContext"), {}),
    ("hostNetwork", _pod(0, "spec", "hostNetwork"), True),
    ("is of the host", _pod(0, "spec", "volumes", 0), HOST),
    ("of the host", _container("head", "ports", 0, "hostPort"), 6379),
    ("no limits", _container(1, "resources", "limits"), {}),
    ("no probes", _container(0, "livenessProbe"), DELETED),
    ("no policy covers it", _pod(0, "metadata", "labels", "m3pc.io/ray"), DELETED),
    ("can ask the API server", _pod(1, "spec", "automountServiceAccountToken"), True),
    ("redis: the pod may run as root", _redis("securityContext"), {}),
    ("redis: redis: readOnlyRootFilesystem", _redis("containers", 0, "securityContext"), {}),
    ("which may be Ray's", _redis("containers", 0, "command", 2), "6379"),
    ("lets everybody in", _redis("containers", 0, "command", 3), "--other"),
    ("what no policy names is open", (DENY,), BASE[RAY]),
    ("the policy that denies", _policy("default-deny", "ingress"), [{}]),
    ("policy ray lets everybody in", _policy("ray", "ingress", 0), {}),
    ("policy ray lets everybody in", _policy("ray", "ingress", 0, "from", 0), {"podSelector": {}}),
    ("policy redis lets everybody in", _policy("redis", "ingress", 0, "from", 0), WORLD),
    ("lets others reach", _policy("metrics", "ingress", 0, "ports", 0, "port"), 8265),
    ("lets others reach", _policy("metrics", "ingress", 0, "ports"), DELETED),
    ("no policy actors-stay-inside", (place("NetworkPolicy", "actors-stay-inside"),), DELETED),
    ("admits pods", (*LABELS, "pod-security.kubernetes.io/enforce"), "baseline"),
    ("not seen by all nodes", CLAIM, ["ReadWriteOnce"]),
    ("is written into a file", (place("Service"),), {"kind": "Secret", "metadata": {"name": "s"}}),
]
# fmt: on


@pytest.mark.parametrize(("finding", "path", "value"), MUTANTS)
def test_each_broken_copy_is_found(finding: str, path: Sequence[str | int], value: Any) -> None:
    findings = kubernetes_findings(changed(BASE, path, value))
    assert [line for line in findings if finding in line], findings


def test_ray_is_started_with_our_settings_ports_and_version() -> None:
    data = BASE[place("ConfigMap")]["data"]
    assert data == SETTINGS | node_ports().environment()
    spec = CLUSTER["spec"]
    groups = [(group, False) for group in spec["workerGroupSpecs"]]
    for group, is_head in [*groups, (spec["headGroupSpec"], True)]:
        words = node_ports().arguments(head=is_head)
        wanted = dict(word.removeprefix("--").split("=") for word in words)
        given = group["rayStartParams"]
        assert {name: given.get(name) for name in wanted} == wanted
        container = group["template"]["spec"]["containers"][0]
        assert container["envFrom"] == [{"configMapRef": {"name": "ray-settings"}}]
        for probe in ("livenessProbe", "readinessProbe"):
            asked = container[probe]["httpGet"]["port"]
            assert str(asked) == wanted["dashboard-agent-listen-port"]
    assert spec["rayVersion"] == ray.__version__


def test_groups_offer_each_role_once_and_the_head_none() -> None:
    spec = CLUSTER["spec"]
    assert "resources" not in spec["headGroupSpec"]["rayStartParams"]
    # KubeRay puts the value into a shell's words: the outer quotes are for the shell.
    offered = {
        group["groupName"]: json.loads(json.loads(group["rayStartParams"]["resources"]))
        for group in spec["workerGroupSpecs"]
    }
    assert offered == {"actor": {"m3pc_actor": 1}, "mind": {"m3pc_planner": 1, "m3pc_learner": 1}}
    assert spec["enableInTreeAutoscaling"] is True
    actor = spec["workerGroupSpecs"][0]
    assert actor["minReplicas"] < actor["maxReplicas"]


def test_images_are_named_where_kustomize_looks() -> None:
    kustomization = load("kubernetes/kustomization.yaml")
    named = {image["name"] for image in kustomization["images"]}
    templates = [t for name, t in _pod_templates(CLUSTER).items() if name != "autoscaler"]
    assert {t["spec"]["containers"][0]["image"] for t in templates} == named
    assert all(
        image["newTag"].startswith(f"{m3pc.__version__}-") for image in kustomization["images"]
    )
