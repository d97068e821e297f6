"""What the launch files must not do, as code: each function returns the faults that it finds.

The files are read as they are shipped; tests change one thing at a time in a copy and expect a
finding.
"""

import copy
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
ALL_INTERFACES = ("0.0.0.0", "::", "[::]", "*", "")
RAY_PORTS = {6379, 8265, 10001}  # with the token, each of them runs code
REDIS_PORT = 6390
METRICS_PORTS = {8080, 9400, 6385, 6386}
PINNED = re.compile(r"^[\w./-]+:v?\d[\w.-]*(@sha256:[0-9a-f]{64})?$")
DELETED = object()  # a change that takes a key away


def load(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def load_all(*names: str) -> list[Any]:
    return [doc for name in names for doc in yaml.safe_load_all((ROOT / name).read_text())]


def changed(document: Any, path: Sequence[str | int], value: Any) -> Any:
    """A copy with one value set or deleted. YAML aliases become separate objects first."""
    result = json.loads(json.dumps(document))
    *parents, last = path
    place = result
    for key in parents:
        place = place[key]
    if value is DELETED:
        del place[last]
    else:
        place[last] = copy.deepcopy(value)
    return result


def options(command: str) -> dict[str, str]:
    """Of a `ray start` in a shell's words: --name=value."""
    words = [word for word in shlex.split(command) if word.startswith("--")]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def _wrong_dashboard(host: str | None, allowed: Sequence[str]) -> Iterator[str]:
    if host not in allowed:
        yield f"the dashboard listens on {host!r}, where outsiders can submit jobs"


# --- cluster.yaml -------------------------------------------------------------------------------


def cluster_findings(config: Mapping[str, Any]) -> list[str]:
    return list(_cluster(config))


def _cluster(config: Mapping[str, Any]) -> Iterator[str]:
    setup = "\n".join(config["setup_commands"])
    if "export RAY_AUTH_MODE=token\n" not in setup:
        yield "Ray asks for no token"
    if 'export RAY_AUTH_TOKEN_PATH="$HOME/.m3pc/token"\n' not in setup:
        yield "Ray is given no token file"
    if re.search(r"RAY_AUTH_TOKEN=|redis://\w+:\w+@", json.dumps(config)):
        yield "a secret is written into the file"
    if "~/.m3pc/token" not in config["file_mounts"]:
        yield "the token does not get to the nodes"
    if not re.search(r"chmod 600 [^&\n]*~/\.m3pc/token", setup):
        yield "others may read the token"
    if not re.search(r"chmod 700 [^&\n]*~/\.m3pc", setup):
        yield "others may enter the folder above Ray's"
    if not re.search(r"^umask 077$", setup, re.MULTILINE):
        yield "Ray is started with an open umask"
    if "--cap-drop=ALL" not in config["docker"]["run_options"]:
        yield "containers keep capabilities"
    if "--security-opt=no-new-privileges" not in config["docker"]["run_options"]:
        yield "processes in containers may gain privileges"
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        starts = [command for command in config[key] if "ray start" in command]
        if len(starts) != 1:
            yield f"{key} starts Ray {len(starts)} times"
        for command in starts:
            yield from _ray_start(command, head=key.startswith("head"))
    yield from _node_images(config)


def _ray_start(command: str, *, head: bool) -> Iterator[str]:
    given = options(command)
    if not command.startswith(". ~/.m3pc/ray.env;"):
        yield "Ray is started without its settings"
    if given.get("--temp-dir") != "$HOME/.m3pc/r":
        yield "Ray's folder is where others may enter"
    if head:
        yield from _wrong_dashboard(given.get("--dashboard-host"), ["127.0.0.1"])
    if head and "--autoscaling-config" not in given:
        yield "the head has no autoscaler"


def _node_images(config: Mapping[str, Any]) -> Iterator[str]:
    types = config.get("available_node_types", {}).values()
    images = [kind["docker"]["worker_image"] for kind in types if "docker" in kind]
    images += [value for key, value in config["docker"].items() if key.endswith("image")]
    yield from _unpinned(images)


def _unpinned(images: Sequence[str]) -> Iterator[str]:
    for image in images:
        if not PINNED.match(image):
            yield f"image {image} is not pinned to a version"


# --- docker -------------------------------------------------------------------------------------


def dockerfile_findings(text: str) -> list[str]:
    return list(_dockerfile(text))


def _dockerfile(text: str) -> Iterator[str]:
    bases = re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", text, re.MULTILINE)
    yield from _unpinned(bases)
    parts = re.split(r"^FROM (\S+) AS (\S+)$", text, flags=re.MULTILINE)[1:]
    stages = {
        name: (base, body)
        for base, name, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    }
    for base, _ in stages.values():
        if base not in stages and base != "${PYTHON_IMAGE}":
            yield f"base {base} is not the one that all images share"
    for name, (base, body) in stages.items():
        users = re.findall(r"^USER (\S+)$", body, re.MULTILINE)
        if base == "runtime" and users != ["1000:1000"]:
            yield f"image {name} runs as {users[-1] if users else 'root'}"
    if "\nHEALTHCHECK " not in text:
        yield "no health check"
    if re.search(r"^(ARG|ENV) .*(TOKEN|PASSWORD|SECRET)\w*=", text, re.MULTILINE):
        yield "a secret is built in"
    if re.search(r"^ADD ", text, re.MULTILINE):
        yield "ADD fetches what nobody has checked"
    if re.search(r"^COPY (?!--from)\.", text, re.MULTILINE):
        yield "the whole folder is copied"
    if "PIP_CONSTRAINT=/build/constraints.txt" not in text:
        yield "dependencies are not pinned"


def compose_findings(config: Mapping[str, Any]) -> list[str]:
    return list(_compose(config))


def _compose(config: Mapping[str, Any]) -> Iterator[str]:
    services: Mapping[str, Any] = config["services"]
    for name, service in services.items():
        yield from (f"{name}: {finding}" for finding in _service(service))
    for name in ("head", "actor", "mind"):
        if services[name].get("environment", {}).get("RAY_AUTH_MODE") != "token":
            yield f"{name}: Ray asks for no token"
        if "--token-file /run/secrets/ray_token" not in " ".join(services[name]["command"]):
            yield f"{name}: Ray is given no token file"
        if "ray_token" not in services[name].get("secrets", []):
            yield f"{name}: the token does not get there"
        if services[name].get("shm_size") is None:
            yield f"{name}: no room for Ray's objects"
    yield from _redis(services["redis"]["command"])
    if not config["networks"]["cluster"].get("internal"):
        yield "the cluster's network is open to the world"
    for name, secret in config["secrets"].items():
        if set(secret) != {"file"}:
            yield f"secret {name} is not a file"
    if re.search(r"redis://\w+:\w+@", json.dumps(config)):
        yield "a secret is written into the file"


def _service(service: Mapping[str, Any]) -> Iterator[str]:
    yield from _unpinned([service["image"]])
    for key, wanted in {"read_only": True, "cap_drop": ["ALL"]}.items():
        if service.get(key) != wanted:
            yield f"{key} is {service.get(key)!r}"
    if "no-new-privileges:true" not in service.get("security_opt", []):
        yield "processes may gain privileges"
    if not service.get("user", "").startswith("${M3PC_UID:?"):
        yield "it runs as the image's user, who may be root"
    for key in ("mem_limit", "cpus", "pids_limit"):
        if not service.get(key):
            yield f"no {key}"
    if service.get("privileged") or service.get("network_mode") == "host":
        yield "it is not kept apart from the host"
    for port in service.get("ports", []):
        host, *_, inner = str(port).split(":")
        if host != "127.0.0.1":
            yield f"port {port} is published beyond loopback"
        if int(inner) in RAY_PORTS | {REDIS_PORT}:
            yield f"port {port} is published"
    for name, value in (service.get("environment") or {}).items():
        if re.search(r"(TOKEN|PASSWORD|SECRET)$", name) and value:
            yield f"secret {name} is in the environment"


def _redis(command: Sequence[str]) -> Iterator[str]:
    given = dict(zip(command[1::2], command[2::2], strict=True))
    if given.get("--port") != str(REDIS_PORT):
        yield f"Redis is at port {given.get('--port')}, which may be Ray's"
    if "--aclfile" not in given or given.get("--protected-mode") != "yes":
        yield "Redis lets everybody in"
    if "--requirepass" in given:
        yield "Redis' password is in its command line"
    if given.get("--maxmemory-policy") != "noeviction":
        yield "Redis forgets"


# --- kubernetes ---------------------------------------------------------------------------------


def kubernetes_findings(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(_kubernetes(documents))


def _kubernetes(documents: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for document in documents:
        by_kind.setdefault(document["kind"], []).append(document)
    for secret in by_kind.get("Secret", []):
        yield f"secret {secret['metadata']['name']} is written into a file"
    if re.search(r"redis://\w+:\w+@", json.dumps(documents)):
        yield "a secret is written into a file"
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in by_kind["NetworkPolicy"]}
    yield from _policies(policies)
    for cluster in by_kind["RayCluster"]:
        yield from _ray_cluster(cluster["spec"], operator="operator" in policies)
    for redis in by_kind["StatefulSet"]:
        template = redis["spec"]["template"]["spec"]
        yield from (f"redis: {finding}" for finding in _pod(template))
        yield from _redis(template["containers"][0]["command"])
    for space in by_kind["Namespace"]:
        if space["metadata"]["labels"].get("pod-security.kubernetes.io/enforce") != "restricted":
            yield "the namespace admits pods that may become root"
    for claim in by_kind["PersistentVolumeClaim"]:
        if claim["spec"]["accessModes"] != ["ReadWriteMany"]:
            yield "runs are not seen by all nodes"


def _ray_cluster(spec: Mapping[str, Any], *, operator: bool) -> Iterator[str]:
    head = spec["headGroupSpec"]
    if spec.get("authOptions", {}).get("mode") != "token":
        yield "KubeRay makes no token"
    if head.get("serviceType", "ClusterIP") != "ClusterIP" or head.get("enableIngress"):
        yield "the head is offered to the world"
    # Only the operator, whom a policy lets in, may need more than loopback.
    allowed = ["127.0.0.1", "$(POD_IP)"] if operator else ["127.0.0.1"]
    yield from _wrong_dashboard(head["rayStartParams"].get("dashboard-host"), allowed)
    password = spec.get("gcsFaultToleranceOptions", {}).get("redisPassword", {})
    if "secretKeyRef" not in password.get("valueFrom", {}):
        yield "Redis' password is not from a Secret"
    yield from _locked("autoscaler", spec["autoscalerOptions"].get("securityContext", {}))
    groups = {"head": head} | {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    for name, group in groups.items():
        template = group["template"]
        yield from (f"{name}: {finding}" for finding in _pod(template["spec"]))
        if template["metadata"]["labels"].get("m3pc.io/ray") != "yes":
            yield f"{name}: no policy covers it"
        if name != "head" and template["spec"].get("automountServiceAccountToken") is not False:
            yield f"{name}: it can ask the API server"
        env = {item["name"]: item for item in template["spec"]["containers"][0]["env"]}
        if env.get("RAY_AUTH_MODE", {}).get("value") != "token":
            yield f"{name}: Ray asks for no token"
        for item in env.values():
            if re.search("TOKEN$|PASSWORD|COORDINATOR", item["name"]) and "value" in item:
                yield f"{name}: {item['name']} is written into a file"


def _pod(pod: Mapping[str, Any]) -> Iterator[str]:
    context = pod.get("securityContext", {})
    if not context.get("runAsNonRoot") or not context.get("runAsUser"):
        yield "the pod may run as root"
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(key):
            yield f"the pod has {key}"
    for volume in pod.get("volumes", []):
        if "hostPath" in volume:
            yield f"volume {volume['name']} is of the host"
    for container in pod["containers"]:
        yield from _locked(container["name"], container.get("securityContext", {}))
        if not {"cpu", "memory"} <= set(container.get("resources", {}).get("limits", {})):
            yield f"{container['name']}: no limits"
        if not {"livenessProbe", "readinessProbe"} <= set(container):
            yield f"{container['name']}: no probes"
        for port in container.get("ports", []):
            if "hostPort" in port:
                yield f"{container['name']}: port {port['hostPort']} of the host"


def _locked(name: str, context: Mapping[str, Any]) -> Iterator[str]:
    wanted = {
        "runAsNonRoot": True,
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    for key, value in wanted.items():
        if context.get(key) != value:
            yield f"{name}: {key} is {context.get(key)!r}"
    if context.get("privileged"):
        yield f"{name}: privileged"


def _policies(policies: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    deny = policies.get("default-deny", {})
    if deny.get("podSelector") != {} or "Ingress" not in deny.get("policyTypes", []):
        yield "what no policy names is open"
    for name, policy in policies.items():
        if name == "default-deny" and policy.get("ingress"):
            yield "the policy that denies lets somebody in"
        for rule in policy.get("ingress", []):
            if not all(_names_pods(peer) for peer in rule.get("from", [{}])):
                yield f"policy {name} lets everybody in"
            ports = {port.get("port") for port in rule.get("ports", [])}
            outsiders = any("namespaceSelector" in peer for peer in rule.get("from", []))
            allowed = {8265} if name == "operator" else METRICS_PORTS
            if outsiders and not (ports and ports <= allowed):
                yield f"policy {name} lets others reach ports {sorted(map(str, ports))}"
    for name in ("ray", "redis", "metrics", "actors-stay-inside"):
        if name not in policies:
            yield f"no policy {name}"


def _names_pods(peer: Mapping[str, Any]) -> bool:
    return "ipBlock" not in peer and bool(peer.get("podSelector", {}).get("matchLabels"))
