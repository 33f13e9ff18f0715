"""The chart with random values, with empty ones, and as a subchart."""

from __future__ import annotations

import base64
import json
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509

from stoker_operator.manifests.variables import expand

from .test_chart import CHART, only, only_named
from .test_chart_objects import FOREIGN, check

Values = dict[str, Any]
#: Secrets that the chart would generate at each render.
NAMED_SECRETS = {"tls": {"secretName": "mine"}, "peers": {"secretName": "mine.too"}}
LONGEST = "a-release-whose-name-has-as-many-letters-as-helm-take"  # 53
BUILD = "0.1.0-rc.1+sha." + "0123456789abcdef" * 4


def render(helm: str, chart: Path, release: str, namespace: str, values: Values, *options: str) -> str:
    """Render the chart with Helm. Raises CalledProcessError if Helm refuses the values."""
    command = [helm, "template", release, chart, f"--namespace={namespace}", "--values=-", *options]
    return subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=True).stdout


def refusal(helm: str, chart: Path, values: Values) -> str:
    """Return Helm's error about these values."""
    with pytest.raises(subprocess.CalledProcessError) as caught:
        render(helm, chart, "stoker", "default", values)
    return str(caught.value.stderr)


def parsed(text: str) -> list[Any]:
    return [each for each in yaml.safe_load_all(text) if each]


def pods_of(documents: list[Any]) -> dict[str, Any]:
    """Return the pod templates of a release, by kind and name."""
    found = {}
    for each in documents:
        if each["kind"] == "Pod":
            found["Pod", each["metadata"]["name"]] = each
        elif each["kind"] in ("Deployment", "Job"):
            found[each["kind"], each["metadata"]["name"]] = each["spec"]["template"]
    return found


def built(tmp_path: Path, version: str) -> Path:
    """Package the chart with build metadata in its version."""
    chart = shutil.copytree(CHART, tmp_path / "built")
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump({**about, "version": version, "appVersion": version}))
    return chart


def drawn(rng: random.Random, namespace: str) -> Values:
    """Return random values, each of which may be missing; all of them must render."""
    endpoint = {"model": {"source": "demo://gemma-3-270m"}, "hardware": {"accelerator": "cpu"}}
    spread = {"topologyKey": "topology.kubernetes.io/zone", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule"}
    volumes = {
        "volumes": [{"name": "authority", "configMap": {"name": "my-authority"}}],
        "volumeMounts": [{"name": "authority", "mountPath": "/etc/authority", "readOnly": True}],
        "env": [{"name": "SSL_CERT_FILE", "value": "/etc/authority/ca.crt"}],
    }
    node = {"key": "a", "operator": "In", "values": ["b"]}
    affinity = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [node]}]}
        }
    }
    optional: Values = {
        "replicas": rng.choice([1, 3, None]),
        "images": rng.choice([None, {"registry": "registry.example.com:5000/a", "pullSecrets": [{"name": "1"}]}]),
        "watchNamespaces": rng.choice([None, [], [namespace], [namespace, "default"]]),
        "catalogue": rng.choice([None, {"runtimes": None}, {"accelerators": {"mine": {"images": "cuda"}}}]),
        "policy": {"template": rng.choice(["Full", "Restricted", "None"])},
        "networkPolicy": {"enabled": rng.random() < 0.8, "prometheus": None},
        "webhook": {
            "certificate": rng.choice(["own", "cert-manager"]), "enabled": rng.random() < 0.7, "certManager": None,
        },
        "monitoring": {
            "kind": rng.choice(["PodMonitor", "ServiceMonitor"]),
            "podMonitor": "Enabled",
            "labels": {"app.kubernetes.io/component": "monitors", "release": "a"},
            "dashboards": rng.choice([None, {"enabled": True, "labels": None}]),
            "alerts": rng.choice([None, {"enabled": True, "labels": {"helm.sh/chart": "mine"}}]),
        },
        "endpoints": rng.choice([None, {"a": {"spec": endpoint}, "b": {"namespace": "default", "spec": endpoint}}]),
        "serviceAccount": rng.choice([None, {"annotations": {"1": "2"}}]),
        "resources": rng.choice([None, {"limits": {"cpu": 1}}]),
        "affinity": rng.choice([None, affinity]),
        "podLabels": rng.choice([None, {"app.kubernetes.io/version": "mine", "1": "true"}]),
        "podAnnotations": rng.choice([None, {"a.example.com/b": "c: d #"}]),
        "nodeSelector": rng.choice([None, {"a": "1"}]),
        "tolerations": rng.choice([None, [{"operator": "Exists"}]]),
        "topologySpreadConstraints": rng.choice([None, [spread], [spread, {**spread, "topologyKey": "a/b"}]]),
    }  # fmt: skip
    values = {name: part for name, part in optional.items() if rng.random() < 0.7}
    values |= rng.choice([{}, volumes])
    if not values.get("watchNamespaces"):
        gateway = {
            "service": rng.choice(
                [
                    None,
                    {"type": "NodePort", "annotations": None},
                    {"type": "LoadBalancer", "loadBalancerClass": "example.com/a", "labels": {"pool": "a"}},
                ]
            ),
            "replicas": rng.choice([1, 2, None]),
            "url": rng.choice([None, "https://models.example.com"]),
            "podLabels": rng.choice([None, {"a": "gateway"}]),
            "podAnnotations": rng.choice([None, {"a.example.com/b": "gateway"}]),
            "resources": rng.choice([None, {"requests": {"memory": "1Gi"}}]),
            "affinity": affinity,
        }
        chosen = {name: part for name, part in gateway.items() if rng.random() < 0.7}
        values["gateway"] = rng.choice([None, {"enabled": True, **NAMED_SECRETS, **chosen, **volumes}])
    return {**values, "crds": {"install": False}, "rbac": {"aggregate": rng.random() < 0.5}}


def test_random_values_render_valid_and_deterministic_objects(kube: Any, helm: str, ns: str, tmp_path: Path) -> None:
    rng = random.Random(20)
    charts = (CHART, built(tmp_path, BUILD))
    releases = [LONGEST, "1e3", "2024", "stoker", *(f"r{number}" for number in range(16))]
    cases = [(rng.choice(charts), release, ns, drawn(rng, ns)) for release in releases]
    with ThreadPoolExecutor(2) as pool:
        texts, second_rendering = (list(pool.map(lambda case: render(helm, *case), cases)) for _ in range(2))
    assert texts == second_rendering
    objects = [each for text in texts for each in parsed(text) if each["kind"] not in FOREIGN]
    accounts = [each for each in objects if each["kind"] == "ServiceAccount"]
    for each in accounts:  # a pod is accepted only if its account exists
        kube.core.create_namespaced_service_account(ns, each)
    check(kube, objects)
    assert {each["metadata"]["labels"]["app.kubernetes.io/instance"] for each in accounts} == set(releases)


def leaves(values: Values, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, part in values.items():
        if isinstance(part, dict) and part:
            yield from leaves(part, (*prefix, name))
        else:
            yield (*prefix, name)


def emptied(paths: list[tuple[str, ...]], on: bool) -> Values:
    """Return values in which these paths are null; with `on`, the gateway is enabled."""
    values: Values = {"gateway": {"enabled": True}} if on else {}
    for path in paths:
        part = values
        for name in path[:-1]:
            part = part.setdefault(name, {})
        part[path[-1]] = None
    return values


def test_empty_values_are_accepted_or_refused_by_name(helm: str) -> None:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    all_paths = [path for path in leaves(defaults) if path != ("gateway", "enabled")]
    needed = [path for path in all_paths if isinstance(at(defaults, path), bool | int) and path[-1] != "replicas"]
    needed += [
        path for path in all_paths if path[-1] in ("template", "failurePolicy", "certificate", "kind", "podMonitor")
    ]
    needed += [("logLevel",), ("logFormat",)]
    # For these, null means disabled.
    optional = ("monitoring", "alerts"), ("monitoring", "dashboards"), ("rbac", "readReferencedObjects")
    needed = [path for path in needed if path[:2] not in optional]
    message = refusal(helm, CHART, emptied(needed, on=True))
    assert "values don't meet the specifications of the schema" in message
    for path in needed:
        line = next(
            line for line in message.splitlines() if f"'{'/'.join(('', *path[:-1]))}'" in line and "missing" in line
        )
        assert f"'{path[-1]}'" in line
    documents = parsed(
        render(helm, CHART, "stoker", "default", emptied([p for p in all_paths if p not in needed], on=True))
    )
    assert len(pods_of(documents)) == 3
    sections = [
        (name,) for name in ("images", "watchNamespaces", "catalogue", "gateway", "serviceAccount", "endpoints")
    ]
    assert render(helm, CHART, "stoker", "default", emptied(sections, on=False)) == render(
        helm, CHART, "stoker", "default", {}
    )


def at(values: Values, path: tuple[str, ...]) -> Any:
    for name in path:
        values = values[name]
    return values


def test_common_values_reach_all_pods(helm: str) -> None:
    spread = {"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}
    values = {
        "gateway": {
            "enabled": True, "podLabels": {"a": "gateway"}, "podAnnotations": {"x": "gateway"},
            "affinity": {"podAntiAffinity": {"g": 1}},
        },
        "endpoints": {"demo": {"spec": {}}},
        "resources": {"limits": {"cpu": "1", "memory": "1Gi"}},
        "podLabels": {"a": "b", "c": "d"},
        "podAnnotations": {"x": "y", "z": "1"},
        "nodeSelector": {"n": "1"},
        "tolerations": [{"operator": "Exists"}],
        "priorityClassName": "system-cluster-critical",
        "topologySpreadConstraints": [spread],
        "affinity": {"podAntiAffinity": {"o": 1}},
    }  # fmt: skip
    pods = pods_of(parsed(render(helm, CHART, "stoker", "default", values)))
    affinities = {name: pod["spec"].get("affinity") for (_, name), pod in pods.items()}
    assert affinities == {
        "stoker": {"podAntiAffinity": {"o": 1}},
        "stoker-gateway": {"podAntiAffinity": {"g": 1}},
        "stoker-endpoints": None,
        "stoker-test": None,
    }
    for (_, name), pod in pods.items():
        metadata, spec = pod["metadata"], pod["spec"]
        is_gateway = name == "stoker-gateway"
        assert {"a": "gateway" if is_gateway else "b", "c": "d"}.items() <= metadata["labels"].items()
        assert {"x": "gateway" if is_gateway else "y", "z": "1"}.items() <= metadata["annotations"].items()
        assert (spec["nodeSelector"], spec["tolerations"]) == ({"n": "1"}, [{"operator": "Exists"}])
        assert spec["priorityClassName"] == "system-cluster-critical"
        (found,) = spec["topologySpreadConstraints"]
        selected = found.pop("labelSelector")["matchLabels"]
        assert found == spread
        assert selected.items() <= metadata["labels"].items()
        assert selected["app.kubernetes.io/name"] == metadata["labels"]["app.kubernetes.io/name"]
        (container,) = spec["containers"]
        assert is_gateway or container["resources"]["limits"] == {"cpu": "1", "memory": "1Gi"}


def test_quota_admits_all_pods_with_the_values_resources(kube: Any, helm: str, ns: str, eventually: Any) -> None:
    hard = {"limits.cpu": "9", "limits.memory": "9Gi", "requests.cpu": "9", "requests.memory": "9Gi"}
    kube.core.create_namespaced_resource_quota(ns, {"metadata": {"name": "all"}, "spec": {"hard": hard}})
    eventually(lambda: kube.core.read_namespaced_resource_quota("all", ns).status.hard, "the quota counts")
    resources = {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "1", "memory": "1Gi"}}
    values = {"endpoints": {"demo": {"spec": {}}}, "gateway": {"enabled": True, "resources": resources}}
    documents = parsed(render(helm, CHART, "stoker", ns, {**values, "resources": resources}))
    for each in documents:
        if each["kind"] == "ServiceAccount":
            kube.core.create_namespaced_service_account(ns, each)
    pods = pods_of(documents)
    assert len(pods) == 4
    for (_, name), pod in pods.items():
        metadata = {**pod["metadata"], "name": name}
        kube.core.create_namespaced_pod(ns, {"metadata": metadata, "spec": pod["spec"]}, dry_run="All")


def test_volumes_reach_the_operator_and_the_gateway(helm: str) -> None:
    def more(name: str) -> Values:
        return {
            "volumes": [{"name": name, "secret": {"secretName": name}}],
            "volumeMounts": [{"name": name, "mountPath": f"/{name}"}],
            "env": [{"name": "SSL_CERT_FILE", "value": f"/{name}/ca.crt"}],
        }

    values = {**more("one"), "gateway": {"enabled": True, **more("two")}}
    documents = parsed(render(helm, CHART, "stoker", "default", values))
    for deployment, name in (("stoker", "one"), ("stoker-gateway", "two")):
        spec = only_named(documents, "Deployment", deployment)["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        assert spec["volumes"][-1:] == more(name)["volumes"]
        assert container["volumeMounts"][-1:] == more(name)["volumeMounts"]
        assert container["env"] == more(name)["env"]


def test_peer_secret_of_the_user_is_used(helm: str) -> None:
    documents = parsed(render(helm, CHART, "stoker", "default", {"gateway": {"enabled": True, **NAMED_SECRETS}}))
    assert [each["metadata"]["name"] for each in documents if each["kind"] == "Secret"] == ["stoker-webhook"]
    spec = only_named(documents, "Deployment", "stoker-gateway")["spec"]["template"]["spec"]
    secrets = {each["name"]: each["secret"]["secretName"] for each in spec["volumes"] if "secret" in each}
    assert secrets == {"peers": "mine.too", "tls": "mine"}


def test_names_of_long_releases_fit_and_differ(helm: str) -> None:
    names: dict[str, set[tuple[str, str]]] = {}
    for release in (LONGEST, f"stoker-{LONGEST[:-8]}a", f"stoker-{LONGEST[:-8]}b"):
        values = {"gateway": {"enabled": True}, "endpoints": {"demo": {"spec": {}}}}
        values["monitoring"] = {"podMonitor": "Enabled", "kind": "ServiceMonitor"}
        documents = parsed(render(helm, CHART, release, "default", values))
        limited = [each for each in documents if each["kind"] in ("Service", "Job")]
        names[release] = {(each["kind"], each["metadata"]["name"]) for each in limited}
        assert len(limited) == len(names[release]) == 6
        assert max(len(name) for _, name in names[release]) <= 63
        pods = only_named(documents, "Deployment", f"{gateway_of(documents)}")["spec"]["template"]["spec"]
        (peers,) = (word for word in pods["containers"][0]["args"] if word.startswith("--peer-service="))
        assert ("Service", peers.partition("=")[2].partition(".")[0]) in names[release]
    assert len({name for found in names.values() for name in found}) == 18


@pytest.mark.parametrize("release", ["2024", "my.rel", "1.2.3", "0", f"9.{'a' * 43}.{'b' * 7}", LONGEST, "stoker", "a"])
def test_service_names_are_valid_in_every_cluster(helm: str, release: str) -> None:
    monitoring = {"podMonitor": "Enabled", "kind": "ServiceMonitor"}
    webhook = {"certificate": "cert-manager"}
    values = {"gateway": {"enabled": True}, "monitoring": monitoring, "webhook": webhook}
    documents = parsed(render(helm, CHART, release, "ns", values))
    services = [each["metadata"]["name"] for each in documents if each["kind"] == "Service"]
    assert len(set(services)) == 5
    for name in services:
        assert re.fullmatch("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name), name
    # All references to the Service use its name.
    (hook,) = only(documents, "ValidatingWebhookConfiguration")["webhooks"]
    assert hook["clientConfig"]["service"]["name"] in services
    assert only(documents, "Certificate")["spec"]["dnsNames"] == [f"{hook['clientConfig']['service']['name']}.ns.svc"]
    args = [word for pod in pods_of(documents).values() for word in pod["spec"]["containers"][0]["args"]]
    (url,) = (word.partition("=")[2] for word in args if word.startswith("--gateway-url="))
    (peers,) = (word.partition("=")[2] for word in args if word.startswith("--peer-service="))
    assert url.removeprefix("https://").removesuffix(".ns.svc") in services
    assert peers.removesuffix(".ns.svc:8082") in services
    (tls,) = (each for each in documents if each["metadata"]["name"].endswith("-gateway-tls"))
    certificate = x509.load_pem_x509_certificate(base64.b64decode(tls["data"]["tls.crt"]))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert url.removeprefix("https://") in names.get_values_for_type(x509.DNSName)
    other_names = [each["metadata"]["name"] for each in documents if each["kind"] != "Service"]
    name = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
    assert all(name.fullmatch(each) for each in other_names)
    if release in ("2024", "a"):  # valid names are kept
        assert {f"{release}-stoker", f"{release}-stoker-gateway", f"{release}-stoker-webhook"} <= set(other_names)


def test_null_removes_an_endpoint_of_another_values_file(helm: str, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(json.dumps({"endpoints": {"a": {"spec": {"x": 1}}, "b": {"spec": {"x": 2}}}}))
    base = f"--values={tmp_path / 'base.yaml'}"

    def applied(overlay: Values) -> Any:
        command = [helm, "template", "stoker", CHART, base, "--values=-"]
        rendered = subprocess.run(command, input=json.dumps(overlay), capture_output=True, text=True, check=True).stdout
        jobs = [each for each in parsed(rendered) if each["kind"] == "Job"]
        words = [job["spec"]["template"]["spec"]["containers"][0]["args"][1] for job in jobs]
        return [each["metadata"]["name"] for word in words for each in json.loads(word)]

    assert applied({}) == ["a", "b"]
    assert applied({"endpoints": {"a": None}}) == ["b"]
    assert applied({"endpoints": {"a": None, "b": None}}) == []


def test_manifests_reach_the_job_unchanged(helm: str) -> None:
    env = [
        {"name": "A", "value": "$(HOME) $$(HOME) $$ $ $x"},
        {"name": "B", "value": 'ä "\\ <&> \n\t \u2028 {{ .Values }}'},
    ]
    spec = {"engine": {"env": env}}
    documents = parsed(render(helm, CHART, "stoker", "default", {"endpoints": {"a": {"spec": spec}}}))
    job = pods_of(documents)["Job", "stoker-endpoints"]
    _, word = (expand(each, {"HOME": "/root"}) for each in job["spec"]["containers"][0]["args"])
    assert [each["spec"] for each in json.loads(word)] == [spec]


def test_replicas_left_empty_are_the_default(helm: str) -> None:
    values = {"replicas": None, "gateway": {"enabled": True, "replicas": None, **NAMED_SECRETS}}
    usual = {"gateway": {"enabled": True, **NAMED_SECRETS}}
    rendered = render(helm, CHART, "stoker", "default", values)
    assert rendered == render(helm, CHART, "stoker", "default", usual)
    assert [each["spec"]["replicas"] for each in parsed(rendered) if each["kind"] == "Deployment"] == [2, 2]


def test_gateway_service_follows_the_values(helm: str) -> None:
    service = {"type": "LoadBalancer", "loadBalancerClass": "example.com/lb", "labels": {"pool": "a"}}
    values = {"gateway": {"enabled": True, "service": service}}
    live = only_named(parsed(render(helm, CHART, "stoker", "default", values)), "Service", "stoker-gateway")
    assert (live["spec"]["type"], live["spec"]["loadBalancerClass"]) == ("LoadBalancer", "example.com/lb")
    assert live["metadata"]["labels"].items() >= {"pool": "a", "app.kubernetes.io/name": "stoker-gateway"}.items()
    service["type"] = "NodePort"
    message = refusal(helm, CHART, values)
    assert "requires gateway.service.type LoadBalancer; set the type, or remove loadBalancerClass" in message


@pytest.mark.parametrize(
    "registry", ["https://r.example.com", "http://r.example.com/a", "oci://r.example.com", "r/", "/r"]
)
def test_registry_must_not_be_a_url(helm: str, registry: str) -> None:
    message = refusal(helm, CHART, {"images": {"registry": registry}})
    assert "'/images/registry': value must be 'HOST[:PORT][/PATH], without https:// and without a slash" in message


def test_invalid_labels_and_annotations_are_refused_by_field(helm: str) -> None:
    keys = ["", "a b", "-a", "a/", "/a", "a/b/c", "A.example.com/a", "a..b/c", "a" * 64, "ä"]
    labels = [*(({key: "a"}) for key in keys), {"a": "b c"}, {"a": "-"}, {"a": "b" * 64}]
    paths = ["podLabels", "gateway/podLabels", "gateway/service/labels", "nodeSelector", "monitoring/labels",
             "monitoring/endpointLabels", "monitoring/alerts/labels", "monitoring/dashboards/labels"]  # fmt: skip
    rng = random.Random(5)
    cases = [(path, rng.choice(labels)) for path in paths] + [(rng.choice(paths), each) for each in labels]
    for path in (
        "podAnnotations",
        "gateway/podAnnotations",
        "gateway/service/annotations",
        "serviceAccount/annotations",
    ):
        cases.append((path, {rng.choice([key for key in keys if key != "A.example.com/a"]): "a"}))
    cases += [
        ("gateway/service/labels", {"app.kubernetes.io/name": "a"}),
        ("podLabels", {"app.kubernetes.io/name": "a"}),
    ]
    with ThreadPoolExecutor(2) as pool:
        for (path, _), message in zip(
            cases, pool.map(lambda case: refusal(helm, CHART, nested(*case)), cases), strict=True
        ):
            assert f"at '/{path}" in message
    fine = {"a.b-c.example.com/x_Y.z-0": "b_C.d-0", "0": "", "a" * 63: "b" * 63}
    values: Values = {"podAnnotations": {"Example.com/a": "any ä $"}, "gateway": {"service": {"labels": fine}}}
    render(helm, CHART, "stoker", "default", {**values, "podLabels": fine, "nodeSelector": fine})


def nested(path: str, part: Values) -> Values:
    """Nest `part` at a path with slashes."""
    for name in reversed(path.split("/")):
        part = {name: part}
    return part


def gateway_of(documents: list[Any]) -> str:
    (name,) = (
        each["metadata"]["name"] for each in documents if each["kind"] == "Deployment" and "--kubernetes" in str(each)
    )
    return str(name)


def test_parent_chart_may_disable_stoker(helm: str, tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "charts/stoker")
    depends = {"name": "stoker", "version": "*", "repository": "", "condition": "stoker.enabled"}
    about = {"apiVersion": "v2", "name": "platform", "version": "1.0.0", "dependencies": [depends]}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(about))
    on = parsed(
        render(helm, tmp_path, "a", "default", {"stoker": {"enabled": True, "watchNamespaces": None, "env": None}})
    )
    assert ("Deployment", "a-stoker") in pods_of(on)
    assert not parsed(render(helm, tmp_path, "a", "default", {"stoker": {"enabled": False}}))
    assert "condition: stoker.enabled" in refusal(helm, CHART, {"enabled": False})


@pytest.mark.parametrize(
    "value",
    [
        "podLabels.app\\.kubernetes\\.io/name=mine",
        "gateway.podLabels.app\\.kubernetes\\.io/instance=mine",
        "podAnnotations.helm\\.sh/hook=test",
        "podAnnotations.checksum/policy=1",
        "topologySpreadConstraints[0].labelSelector.matchLabels.a=b",
        "volumes[0].emptyDir.medium=Memory",
        "volumes[0].name=tmp",
        "gateway.volumes[0].name=peers",
        "volumeMounts[0].name=a",
        "gateway.peers.token=a",
        "gateway.peers.secretName=A",
        "enabled=maybe",
    ],
)
def test_a_wrong_value_is_refused(helm: str, value: str) -> None:
    command = [helm, "template", "stoker", CHART, "--set", value]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode != 0
    assert "values don't meet the specifications of the schema" in result.stderr
