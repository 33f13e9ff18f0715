"""What the operator reconciles, and what it leaves unchanged."""

from __future__ import annotations

import time
from typing import Any

import pytest
from kubernetes import client


@pytest.fixture(autouse=True)
def running(operator: Any) -> Any:
    """All tests of this module need a running operator."""
    return operator


def ready(kube: Any, ns: str, reason: str, status: str = "False") -> Any:
    condition = kube.condition(ns, "demo")
    return condition if (condition.get("status"), condition.get("reason")) == (status, reason) else None


def events(kube: Any, ns: str) -> list[Any]:
    """Return the Events about the endpoint, oldest first."""
    listed = kube.core.list_namespaced_event(ns).items
    found = [each for each in listed if each.involved_object.kind == "InferenceEndpoint"]
    return sorted(found, key=lambda each: int(each.metadata.resource_version))


def args(deployment: Any) -> Any:
    return deployment["spec"]["template"]["spec"]["containers"][0]["args"]


def one_replica(kube: Any, ns: str, name: str) -> bool:
    """Return whether its Deployment has one replica and the endpoint's status reports it."""
    live, endpoint = kube.deployment(ns, name), kube.endpoint(ns, name)
    counts = {each.get("status", {}).get("replicas") for each in (live, endpoint)}
    seen = live.get("status", {}).get("observedGeneration") == live["metadata"]["generation"]
    return seen and counts == {1}


def wait_until_ready(kube: Any, ns: str, eventually: Any, replicas: int = 1) -> None:
    """Act as the kubelet until the endpoint is ready."""

    def serve() -> Any:
        pods = kube.pods(ns, "demo")
        for pod in pods:
            if pod.status.phase == "Pending":
                kube.mark_ready(ns, pod.metadata.name)
        return len(pods) == replicas and ready(kube, ns, "Ready", "True")

    eventually(serve, "Ready")


def test_endpoint_becomes_objects_and_a_status(kube: Any, ns: str, document: Any, eventually: Any) -> None:
    kube.create(ns, document(engine={"dtype": "float32", "maxNumSeqs": 8}))
    eventually(lambda: ready(kube, ns, "RollingOut"), "reported as rolling out")
    uid = kube.endpoint(ns, "demo")["metadata"]["uid"]

    deployment = kube.deployment(ns, "demo")
    service = kube.get(f"/api/v1/namespaces/{ns}/services/demo")
    account = kube.get(f"/api/v1/namespaces/{ns}/serviceaccounts/demo")
    for child in (deployment, service, account):
        (reference,) = child["metadata"]["ownerReferences"]
        assert (reference["uid"], reference["controller"], reference["blockOwnerDeletion"]) == (uid, True, True)
        assert child["metadata"]["labels"]["app.kubernetes.io/instance"] == "demo"
    assert account["automountServiceAccountToken"] is False
    assert args(deployment) == [
        "serve", "demo://gemma-3-270m", "--served-model-name", "gemma-3-270m", "--dtype=float32", "--device=cpu",
        "--max-num-seqs=8", "--max-engine-restarts=3",
    ]  # fmt: skip

    status = kube.endpoint(ns, "demo")["status"]
    assert status["observedGeneration"] == 1
    assert status["url"] == f"http://demo.{ns}.svc:8000/v1"
    (workload,) = status["workloads"]
    assert (workload["name"], workload["runtime"], workload["image"]) == ("main", "stoker", "stoker/engine-cpu:0.1.0")
    assert (workload["plan"]["tensor"], workload["plan"]["data"]) == (1, 1)
    assert workload["engine"]["args"] == args(deployment)
    conditions = {each["type"]: each["status"] for each in status["conditions"]}
    assert conditions == {
        "Accepted": "True", "Planned": "True", "Available": "False", "Progressing": "True", "Stalled": "False",
        "Ready": "False",
    }  # fmt: skip

    wait_until_ready(kube, ns, eventually)
    status = kube.endpoint(ns, "demo")["status"]
    assert (status["replicas"], status["readyReplicas"], status["availableReplicas"]) == (1, 1, 1)
    assert {each["type"]: each["status"] for each in status["conditions"]} == {
        "Accepted": "True", "Planned": "True", "Available": "True", "Progressing": "False", "Stalled": "False",
        "Ready": "True",
    }  # fmt: skip
    eventually(lambda: len(events(kube, ns)) == 2, "both are emitted")  # the Event is written after the status
    reported_events = [(event.type, event.reason) for event in events(kube, ns)]
    assert reported_events == [("Normal", "RollingOut"), ("Normal", "Ready")]


def test_operator_writes_only_the_status_of_the_users_object(
    kube: Any, ns: str, document: Any, eventually: Any
) -> None:
    kube.create(ns, document())
    eventually(lambda: ready(kube, ns, "RollingOut"), "reported")
    endpoint = kube.endpoint(ns, "demo")
    assert "finalizers" not in endpoint["metadata"]
    assert "annotations" not in endpoint["metadata"]
    assert endpoint["metadata"]["generation"] == 1
    assert endpoint["spec"] == {**document()["spec"], "replicas": 1}
    ours = [each for each in endpoint["metadata"]["managedFields"] if each["manager"] == "stoker"]
    assert [each["subresource"] for each in ours] == ["status"]


def test_new_spec_rolls_out(kube: Any, ns: str, document: Any, eventually: Any) -> None:
    kube.create(ns, document(engine={"maxNumSeqs": 8, "env": [{"name": "A", "value": "1"}]}))
    eventually(lambda: kube.pods(ns, "demo"), "a pod")
    wait_until_ready(kube, ns, eventually)
    (before,) = kube.pods(ns, "demo")

    kube.patch(ns, "demo", {"engine": {"maxNumSeqs": 16, "env": None}})
    eventually(lambda: "--max-num-seqs=16" in args(kube.deployment(ns, "demo")), "the Deployment is changed")
    container = kube.deployment(ns, "demo")["spec"]["template"]["spec"]["containers"][0]
    assert "A" not in [variable["name"] for variable in container["env"]]  # removed with the spec's field
    progressing = eventually(lambda: kube.condition(ns, "demo", "Progressing"), "reported")
    assert progressing["status"] == "True"
    assert kube.condition(ns, "demo", "Available")["status"] == "True"  # the old pod still serves
    wait_until_ready(kube, ns, eventually)
    (after,) = kube.pods(ns, "demo")
    assert after.metadata.name != before.metadata.name


def test_foreign_removals_and_changes_are_reverted(kube: Any, ns: str, document: Any, eventually: Any) -> None:
    kube.create(ns, document())
    eventually(lambda: ready(kube, ns, "RollingOut"), "reported")
    uid = kube.get(f"/api/v1/namespaces/{ns}/services/demo")["metadata"]["uid"]
    kube.core.delete_namespaced_service("demo", ns)
    service = f"/api/v1/namespaces/{ns}/services/demo"
    eventually(lambda: kube.get(service)["metadata"]["uid"] != uid, "the Service is back")

    kube.apps.patch_namespaced_deployment("demo", ns, {"spec": {"replicas": 3}})
    eventually(lambda: kube.deployment(ns, "demo")["spec"]["replicas"] == 1, "the replicas are ours")


def test_additions_of_other_clients_stay(kube: Any, ns: str, document: Any, eventually: Any) -> None:
    kube.create(ns, document())
    eventually(lambda: ready(kube, ns, "RollingOut"), "reported")
    # As `kubectl rollout restart` does.
    restarted = {"kubectl.kubernetes.io/restartedAt": "2026-01-01T00:00:00Z"}
    template = {"spec": {"template": {"metadata": {"annotations": restarted}}}}
    kube.apps.patch_namespaced_deployment("demo", ns, template)
    kube.patch(ns, "demo", {"engine": {"maxNumSeqs": 4}})
    eventually(lambda: "--max-num-seqs=4" in args(kube.deployment(ns, "demo")), "the Deployment is changed")
    deployment = kube.deployment(ns, "demo")
    assert deployment["spec"]["template"]["metadata"]["annotations"] == restarted


def test_object_of_another_owner_is_left_alone(kube: Any, ns: str, document: Any, eventually: Any) -> None:
    theirs = {"metadata": {"name": "demo"}, "spec": {"ports": [{"port": 1234}], "selector": {"app": "theirs"}}}
    kube.core.create_namespaced_service(ns, theirs)
    kube.create(ns, document())
    condition = eventually(lambda: ready(kube, ns, "NameConflict"), "the conflict is reported")
    assert condition["message"].startswith("Service demo was not created by Stoker and is not changed; delete it, or")
    service = kube.get(f"/api/v1/namespaces/{ns}/services/demo")
    assert service["spec"]["selector"] == {"app": "theirs"}
    assert "labels" not in service["metadata"]
    with pytest.raises(client.ApiException):
        kube.apps.read_namespaced_deployment("demo", ns)

    kube.core.delete_namespaced_service("demo", ns)
    eventually(lambda: ready(kube, ns, "RollingOut"), "the endpoint goes on")


def test_orphans_are_adopted_and_nulls_are_applied(kube: Any, ns: str, document: Any, eventually: Any) -> None:
    kube.create(ns, document(template={"spec": {"securityContext": {"fsGroup": None}}}))
    eventually(lambda: ready(kube, ns, "RollingOut"), "reported")
    deployment = kube.deployment(ns, "demo")
    context = deployment["spec"]["template"]["spec"]["securityContext"]
    assert context["runAsNonRoot"] and "fsGroup" not in context
    uid = deployment["metadata"]["ownerReferences"][0]["uid"]
    orphan = [{"op": "remove", "path": "/metadata/ownerReferences"}]  # as with --cascade=orphan
    kube.apps.patch_namespaced_deployment("demo", ns, orphan)
    kube.core.patch_namespaced_service("demo", ns, orphan)

    def owners(live: Any) -> list[str]:
        return [each["uid"] for each in live["metadata"].get("ownerReferences", ())]

    eventually(lambda: owners(kube.deployment(ns, "demo")) == [uid], "the Deployment is adopted")
    eventually(lambda: owners(kube.get(f"/api/v1/namespaces/{ns}/services/demo")) == [uid], "the Service is adopted")
    adopted = kube.deployment(ns, "demo")
    assert adopted["metadata"]["uid"] == deployment["metadata"]["uid"]
    assert adopted["spec"]["template"] == deployment["spec"]["template"]


def test_spec_outside_the_catalogue_is_refused(kube: Any, ns: str, document: Any, eventually: Any) -> None:
    kube.create(ns, document(engine={"maxNumSeqs": 8}))
    eventually(lambda: ready(kube, ns, "RollingOut"), "reported")
    kube.patch(ns, "demo", {"hardware": {"accelerator": "no-such-gpu"}, "engine": {"maxNumSeqs": 9}})
    condition = eventually(lambda: ready(kube, ns, "UnknownAccelerator"), "refused")
    assert condition["message"].startswith("spec.hardware.accelerator: no-such-gpu is not in the accelerator catalogue")
    assert kube.condition(ns, "demo", "Accepted")["status"] == "False"
    assert "--max-num-seqs=8" in args(kube.deployment(ns, "demo"))  # the running Deployment is unchanged
    kube.patch(ns, "demo", {"hardware": {"accelerator": "cpu"}, "engine": {"args": ["--no-such-flag"]}})
    condition = eventually(lambda: ready(kube, ns, "Invalid"), "refused")
    assert condition["message"].startswith("spec.engine.args: ")


def test_refusals_of_the_api_server_are_reported(kube: Any, ns: str, document: Any, eventually: Any) -> None:
    resources = {"limits": {"memory": "8Gi"}, "requests": {"memory": "9Gi"}}
    kube.create(ns, document(hardware={"accelerator": "cpu", "resources": resources}))
    condition = eventually(lambda: ready(kube, ns, "ApplyFailed"), "reported")
    assert "must be less than or equal to memory limit" in condition["message"]
    kube.patch(ns, "demo", {"hardware": {"resources": None}})
    eventually(lambda: ready(kube, ns, "RollingOut"), "healed")


@pytest.mark.parametrize(
    ("waiting", "last", "reason", "words"),
    [
        ({"reason": "ImagePullBackOff", "message": "not found"}, {}, "ImagePullError", "cannot be pulled: not found"),
        (
            {"reason": "CrashLoopBackOff"},
            {"terminated": {"exitCode": 1, "reason": "Error", "message": "weights are missing"}},
            "CrashLoopBackOff",
            "ended with code 1: weights are missing",
        ),
    ],
)
def test_pod_problems_are_reported(
    kube: Any, ns: str, document: Any, eventually: Any, waiting: Any, last: Any, reason: str, words: str
) -> None:
    kube.create(ns, document())
    (pod,) = eventually(lambda: kube.pods(ns, "demo"), "a pod")
    container = {
        "name": "engine", "image": "i", "imageID": "", "ready": False, "restartCount": 1,
        "state": {"waiting": waiting}, "lastState": last,
    }  # fmt: skip
    kube.set_pod_status(ns, pod.metadata.name, phase="Pending", containerStatuses=[container])
    condition = eventually(lambda: ready(kube, ns, reason), "reported")
    assert words in condition["message"]
    (reported,) = eventually(lambda: [event for event in events(kube, ns) if event.reason == reason], "an Event")
    assert (reported.type, words in reported.message) == ("Warning", True)
    wait_until_ready(kube, ns, eventually)  # it recovers


def test_scaling_goes_through_the_endpoint(kube: Any, ns: str, document: Any, eventually: Any) -> None:
    kube.create(ns, document())
    wait_until_ready(kube, ns, eventually)
    path = ("stoker.dev", "v1alpha1", ns, "inferenceendpoints", "demo")
    kube.custom.patch_namespaced_custom_object_scale(*path, {"spec": {"replicas": 2}})
    wait_until_ready(kube, ns, eventually, replicas=2)
    scale = kube.custom.get_namespaced_custom_object_scale(*path)
    assert scale["status"]["replicas"] == 2
    assert len(kube.core.list_namespaced_pod(ns, label_selector=scale["status"]["selector"]).items) == 2
    kube.custom.patch_namespaced_custom_object_scale(*path, {"spec": {"replicas": 0}})
    eventually(lambda: ready(kube, ns, "ScaledToZero", "True"), "scaled to zero")


def test_disruption_budget_follows_the_number_of_replicas(kube: Any, ns: str, document: Any, eventually: Any) -> None:
    kube.create(ns, document(replicas=2))
    budget = f"/apis/policy/v1/namespaces/{ns}/poddisruptionbudgets/demo"
    assert eventually(lambda: kube.get(budget), "the budget")["spec"]["maxUnavailable"] == 1
    kube.patch(ns, "demo", {"replicas": 1})

    def is_deleted() -> bool:
        return not kube.get(budget.rpartition("/")[0])["items"]

    eventually(is_deleted, "the budget is gone")
    policy = kube.get(f"/apis/networking.k8s.io/v1/namespaces/{ns}/networkpolicies/demo")
    assert policy["spec"]["policyTypes"] == ["Ingress"]


def test_template_is_checked_by_the_api_server(kube: Any, ns: str, document: Any, eventually: Any) -> None:
    kube.create(ns, document(template={"spec": {"nodeSelectr": {"disk": "ssd"}}}))
    condition = eventually(lambda: ready(kube, ns, "InvalidTemplate"), "refused")
    assert "spec.template: " in condition["message"] and "nodeSelectr" in condition["message"]
    assert kube.condition(ns, "demo", "Stalled")["status"] == "True"
    assert kube.apps.list_namespaced_deployment(ns).items == []
    kube.patch(ns, "demo", {"template": {"spec": {"nodeSelectr": None, "nodeSelector": {"disk": "ssd"}}}})
    eventually(lambda: ready(kube, ns, "RollingOut"), "accepted")
    assert kube.deployment(ns, "demo")["spec"]["template"]["spec"]["nodeSelector"] == {"disk": "ssd"}


def test_rapid_edits_and_reverts_end_at_the_last_spec(kube: Any, ns: str, document: Any, eventually: Any) -> None:
    kube.create(ns, document())
    wait_until_ready(kube, ns, eventually)
    for number in (3, 4, 5, 3, 7, 6):
        kube.patch(ns, "demo", {"engine": {"maxNumSeqs": number}})
        assert kube.condition(ns, "demo", "Available").get("status") != "False"
    eventually(lambda: "--max-num-seqs=6" in args(kube.deployment(ns, "demo")), "the last one")
    wait_until_ready(kube, ns, eventually)


def test_exceeded_quota_is_named(kube: Any, ns: str, document: Any, eventually: Any) -> None:
    quota = {"metadata": {"name": "team"}, "spec": {"hard": {"pods": "0"}}}
    kube.core.create_namespaced_resource_quota(ns, quota)
    eventually(lambda: kube.core.read_namespaced_resource_quota("team", ns).status.hard, "the quota counts")
    kube.create(ns, document())
    condition = eventually(lambda: ready(kube, ns, "QuotaExceeded"), "reported")
    assert "exceeded quota: team" in condition["message"]
    kube.core.delete_namespaced_resource_quota("team", ns)
    kube.patch(ns, "demo", {"engine": {"maxNumSeqs": 2}})  # avoids waiting for the controller's back-off
    wait_until_ready(kube, ns, eventually)


@pytest.mark.parametrize(
    "named",
    [
        {"storage": {"cache": {"persistentVolumeClaim": {"claimName": "weights"}}}},
        {"model": {"source": "pvc://weights/llama"}},
    ],
    ids=["cache", "model"],
)
def test_a_claim_that_cannot_be_shared_is_refused(
    kube: Any, ns: str, document: Any, eventually: Any, named: Any
) -> None:
    claim = {
        "metadata": {"name": "weights"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    kube.core.create_namespaced_persistent_volume_claim(ns, claim)
    kube.create(ns, document(replicas=2, **named))
    condition = eventually(lambda: ready(kube, ns, "VolumeNotShared"), "refused")
    assert "ReadWriteMany" in condition["message"]
    kube.patch(ns, "demo", {"replicas": 1, "rollout": {"maxSurge": 0, "maxUnavailable": 1}})
    eventually(lambda: ready(kube, ns, "RollingOut"), "accepted")


def test_claim_grows_without_ending_a_pod(kube: Any, ns: str, document: Any, eventually: Any) -> None:
    storage = client.StorageV1Api(kube.api)
    grows = {"metadata": {"name": ns}, "provisioner": "example.com/none", "allowVolumeExpansion": True}
    storage.create_storage_class(grows)
    volume = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteMany"],
        "storageClassName": ns,
        "hostPath": {"path": "/nowhere"},
        "persistentVolumeReclaimPolicy": "Retain",
        "claimRef": {"namespace": ns, "name": "demo"},
    }
    kube.core.create_persistent_volume({"metadata": {"name": ns}, "spec": volume})

    def cache(size: str) -> Any:
        resources = {"requests": {"storage": size}}
        claim = {"accessModes": ["ReadWriteMany"], "storageClassName": ns, "resources": resources}
        return {"cache": {"volumeClaimTemplate": {"spec": claim}}}

    kube.create(ns, document(storage=cache("1Gi")))
    live = lambda: kube.core.read_namespaced_persistent_volume_claim("demo", ns)  # noqa: E731
    eventually(lambda: live().status.phase == "Bound", "the claim is bound")
    eventually(lambda: kube.pods(ns, "demo") or None, "its pod is made")
    before = kube.deployment(ns, "demo")["metadata"]["generation"]
    kube.patch(ns, "demo", {"storage": cache("2Gi")})
    eventually(lambda: live().spec.resources.requests["storage"] == "2Gi", "the claim requests more")
    assert kube.deployment(ns, "demo")["metadata"]["generation"] == before
    kube.core.delete_persistent_volume(ns)
    storage.delete_storage_class(ns)


def test_deletion_leaves_nothing(kube: Any, ns: str, document: Any, eventually: Any) -> None:
    kube.create(ns, document())
    eventually(lambda: kube.pods(ns, "demo"), "a pod")
    kube.delete(ns, "demo")

    def is_deleted() -> bool:
        remaining = (
            kube.apps.list_namespaced_deployment(ns).items
            + kube.apps.list_namespaced_replica_set(ns).items
            + kube.core.list_namespaced_service(ns).items
            + kube.core.list_namespaced_pod(ns).items
            + [each for each in kube.core.list_namespaced_service_account(ns).items if each.metadata.name == "demo"]
        )
        return not remaining

    eventually(is_deleted, "all objects are gone")


def test_deletion_needs_no_operator_and_a_restart_writes_nothing(
    kube: Any, ns: str, document: Any, eventually: Any, running: Any
) -> None:
    for name in ("one", "two", "demo"):
        kube.create(ns, document(name))
        eventually(lambda name=name: kube.condition(ns, name), "reported")  # type: ignore[misc]
    wait_until_ready(kube, ns, eventually)
    # The number of pods is reported last: an operator that stopped earlier would report it after its restart.
    for name in ("one", "two", "demo"):
        eventually(lambda name=name: one_replica(kube, ns, name), "nothing is left to report")  # type: ignore[misc]
    time.sleep(1)  # sleeps: there is no event for the absence of writes
    assert running.stop() == 0
    before = kube.writes(ns)
    assert before["deployments"] >= 3

    kube.delete(ns, "two")
    path = f"/apis/apps/v1/namespaces/{ns}/deployments"
    eventually(lambda: len(kube.get(path)["items"]) == 2, "its Deployment is gone")

    running.start()
    looked = eventually(running.reconciles, "it looks at what is there")
    time.sleep(8)  # sleeps: longer than the operator's interval for endpoints that are not ready
    eventually(lambda: running.reconciles() > looked, "it has looked again")
    assert kube.writes(ns) == before

    assert running.stop() == 0
    kube.patch(ns, "one", {"engine": {"maxNumSeqs": 3}})
    running.start()
    eventually(lambda: "--max-num-seqs=3" in args(kube.deployment(ns, "one")), "what was missed is made up for")
    eventually(lambda: kube.condition(ns, "one"), "and reported")
    time.sleep(4)  # sleeps: there is no event for the absence of writes
    after = kube.writes(ns)
    # One Deployment write for the one changed spec; the status at most once per change of the Deployment.
    assert after["deployments"] - before["deployments"] == 1
    assert (after["services"], after["serviceaccounts"]) == (before["services"], before["serviceaccounts"])
    assert 1 <= after["inferenceendpoints"] - before["inferenceendpoints"] <= 4


def test_recreated_endpoint_adopts_the_objects(kube: Any, ns: str, document: Any, eventually: Any) -> None:
    kube.create(ns, document())
    eventually(lambda: ready(kube, ns, "RollingOut"), "reported")
    kube.delete(ns, "demo")
    kube.create(ns, document(engine={"maxNumSeqs": 2}))
    uid = kube.endpoint(ns, "demo")["metadata"]["uid"]

    def adopted() -> bool:
        deployment = kube.deployment(ns, "demo")
        return deployment["metadata"]["ownerReferences"][0]["uid"] == uid and "--max-num-seqs=2" in args(deployment)

    eventually(adopted, "the new one's objects")
    eventually(lambda: ready(kube, ns, "RollingOut"), "reported")
