"""The chart renders what lies in deploy/kubernetes, Kubernetes takes it, and its parts fit each other."""

from __future__ import annotations

import re
from typing import Any

import kubernetes_validate
import pytest
import yaml

from deploy.render import CHART, DEPLOY, MANIFESTS, manifests, rendered
from tensorhub.runtime.sigterm import LEAVE_S

CUSTOM = "ServiceMonitor"  # Prometheus' operator brings its schema


def objects(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((MANIFESTS / name).read_text(encoding="utf-8")))


def pods(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each["spec"]["template"] for each in found if "template" in each.get("spec", {})]


def needs_helm() -> Any:
    reason = "helm-python-sdk (75 MB) is not installed: make chart"
    return pytest.importorskip("helm_python", reason=reason)


def test_the_manifests_are_what_the_chart_renders() -> None:
    assert needs_helm().lint(CHART)["errors"] == []
    lying = {path.name: path.read_text(encoding="utf-8") for path in MANIFESTS.glob("*.yaml")}
    assert manifests() == lying, "python deploy/render.py"


@pytest.mark.parametrize("version", ["1.29", "1.37"])
@pytest.mark.parametrize("name", ["single.yaml", "lease.yaml", "etcd.yaml"])
def test_kubernetes_takes_the_manifests(name: str, version: str) -> None:
    for each in objects(name):
        if each["kind"] != CUSTOM:
            kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("name", ["single.yaml", "lease.yaml", "etcd.yaml"])
def test_the_parts_of_the_manifests_fit_each_other(name: str) -> None:
    found = objects(name)
    services = {
        each["metadata"]["name"]: each["spec"] for each in found if each["kind"] == "Service"
    }
    for service, said in services.items():  # one of each coordinator, and the headless one of all
        assert said["publishNotReadyAddresses"]
        pod_name = said["selector"].get("statefulset.kubernetes.io/pod-name")
        assert pod_name == (None if said.get("clusterIP") == "None" else service)
    for role in (each for each in found if each["kind"] == "Role"):
        verbs = sorted(verb for rule in role["rules"] for verb in rule["verbs"])
        assert verbs == ["create", "get", "update"]
    labels = [pod["metadata"]["labels"] for pod in pods(found)]
    for each in found:
        spec = each.get("spec", {})
        chosen = spec.get("selector") or spec.get("podSelector") or {}
        chosen = chosen.get("matchLabels", chosen)
        chosen = {key: chosen[key] for key in chosen if "statefulset" not in key}
        if each["kind"] != CUSTOM:
            assert any(chosen.items() <= those.items() for those in labels), each
    for pod in (each["spec"] for each in pods(found)):
        (container,) = pod["containers"]
        environment = {each["name"]: each.get("value", "") for each in container["env"]}
        assert set(re.findall(r"\$\((\w+)\)", " ".join(container["args"]))) <= environment.keys()
        addresses = environment.get("TENSORHUB_ADDRESS", "")
        for service in re.findall(r"tcp://([^.]+)\.tensorhub\.svc:17337", addresses):
            assert services[service]["publishNotReadyAddresses"]
        mounted = {each["mountPath"] for each in container["volumeMounts"]}
        files = [value for value in environment.values() if value.startswith("/var/run")]
        assert all(path.rpartition("/")[0] in mounted for path in files)
        volumes = {each["name"] for each in pod["volumes"]} | {"state"}
        assert {each["name"] for each in container["volumeMounts"]} <= volumes
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert pod["terminationGracePeriodSeconds"] > LEAVE_S
        assert pod["securityContext"]["runAsNonRoot"]
        user, image = pod["securityContext"]["runAsUser"], DEPLOY / "Containerfile"
        assert f"USER {user}:{user}\n" in image.read_text(encoding="utf-8")
        secrets = [each["secret"] for each in pod["volumes"] if "secret" in each]
        assert secrets
        assert all(each["defaultMode"] & 0o007 == 0 for each in secrets)
    for each in (each["spec"] for each in found if each["kind"] == "StatefulSet"):
        (container,) = each["template"]["spec"]["containers"]
        if each["replicas"] > 1:  # no rollout may wait until a standby leads
            assert container["readinessProbe"]["httpGet"]["path"] == "/healthz"
        if any("--ha=kubernetes" in arg for arg in container["args"]):
            (claim,) = (one for one in found if one["kind"] == "PersistentVolumeClaim")
            assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    (policy,) = (each["spec"] for each in found if each["kind"] == "NetworkPolicy")
    for rule in policy["ingress"]:
        if any(each["port"] <= 8080 <= each.get("endPort", each["port"]) for each in rule["ports"]):
            assert [bool(each.get("namespaceSelector")) for each in rule["from"]] == [True]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"coordinator": {"ha": "redis"}}, "ha"),
        ({"coordinator": {"ha": "etcd"}}, "url"),
        ({"coordinator": {"ha": "etcd", "etcd": {"url": "etcd://root:word@e:2379/x"}}}, "url"),
        ({"seeds": [{"name": "a", "model": "m", "zone": "z"}]}, "memory"),
        ({"seeds": [{"name": "a", "model": "m", "zone": "z", "memory": "500Mi"}]}, "memory"),
        ({"archive": {"enabled": True}}, "model"),
        ({"coordinators": 3}, "coordinators"),
        ({"token": {}, "monitoring": {"serviceMonitor": True}}, "the key read-only"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(values: dict[str, Any], text: str) -> None:
    helm = needs_helm()
    with pytest.raises(helm.HelmError, match=text):
        rendered(values)


def test_without_a_secret_of_its_own_a_release_gets_a_random_token_and_a_dashboard_if_asked() -> (
    None
):
    needs_helm()
    one, other = (
        [
            yaml.safe_load(part)
            for part in rendered({"monitoring": {"dashboard": True}}).split("\n---\n")
        ]
        for _ in range(2)
    )
    tokens = [each["data"]["token"] for each in (*one, *other) if each["kind"] == "Secret"]
    assert len(tokens) == len(set(tokens)) == 2
    (dashboard,) = [each["data"] for each in one if each["kind"] == "ConfigMap"]
    assert yaml.safe_load(dashboard["tensorhub.json"])["uid"] == "tensorhub"
