"""One endpoint, made so: against an API server of a few lines, which counts what it is asked. (The real one is in
e2e/apiserver; not shown here: merging, defaults, garbage collection.)"""

from __future__ import annotations

import copy
import dataclasses
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from stoker_engine.contract.engine_state import EngineState
from stoker_operator.api.v1alpha1 import KIND
from stoker_operator.cluster.informer import Informer
from stoker_operator.cluster.kube import KubeError, Listing
from stoker_operator.cluster.store import Store
from stoker_operator.objects.facts import EngineStates, Key, Reported
from stoker_operator.objects.owner import GENERATION, INSTANCE
from stoker_operator.plan.capacity import Holder
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.model_shapes import table
from stoker_operator.policy.policy import Policy
from stoker_operator.reconcile.apply import MANAGER, NotLeading, Writer
from stoker_operator.reconcile.evaluate import PlanningContext
from stoker_operator.reconcile.pinning import ANNOTATION
from stoker_operator.reconcile.reconcile import Cluster, Outcome, reconcile
from stoker_operator.reconcile.routing import Route
from stoker_operator.settings import GatewaySettings

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
KEY = Key("default", "demo")


class FakeKube:
    """Objects by kind and name, and the requests that were made."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.requests: list[str] = []
        self.version = 100
        self.refuse: dict[str, str] = {}

    def seen(self, body: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        live: dict[str, Any] = copy.deepcopy(body)
        live["metadata"] |= {"resourceVersion": str(self.version), "uid": f"uid-{body['kind']}"}
        live["metadata"].setdefault("generation", 1)
        live["metadata"].setdefault("creationTimestamp", f"{NOON:%Y-%m-%dT%H:%M:%SZ}")
        self.objects[live["kind"], live["metadata"]["name"]] = live
        return copy.deepcopy(live)

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        self.requests.append(f"get {kind}")
        return copy.deepcopy(self.objects.get((kind, name)))

    def list(self, kind: str, namespace: str = "", labels: Any = None, fields: str = "") -> Listing:
        self.requests.append(f"list {kind}")
        name = fields.removeprefix("metadata.name=")
        found = [copy.deepcopy(live) for id, live in self.objects.items() if id[0] == kind and name in ("", id[1])]
        return Listing(found, str(self.version))

    def serves(self, kind: str) -> bool:
        return False

    def apply(self, body: Any, manager: str, subresource: str = "", *, dry_run: bool = False) -> dict[str, Any]:
        kind = body["kind"]
        self.requests.append(f"{'check' if dry_run else 'apply'} {kind}{f'/{subresource}' if subresource else ''}")
        if kind in self.refuse and not subresource:
            raise KubeError(422, self.refuse[kind])
        before = self.objects.get((kind, body["metadata"]["name"]), {})
        version = body["metadata"].get("resourceVersion")
        if before and version not in (None, before["metadata"]["resourceVersion"]):
            raise KubeError(409, "the object has been modified")
        if dry_run:
            return dict(body)
        if subresource:
            return self.seen({**before, "status": body["status"]})
        fields = {f"f:{name}": _fields(body[name]) for name in body.keys() & {"spec"}}
        entry = {"manager": manager, "operation": "Apply", "fieldsV1": fields}
        metadata = {**body["metadata"], "managedFields": [entry]}
        if before:
            metadata["generation"] = before["metadata"]["generation"] + (before.get("spec") != body.get("spec"))
        return self.seen({**body, "metadata": metadata, "status": before.get("status", {})})

    def create(self, body: Any) -> dict[str, Any]:
        self.requests.append(f"create {body['kind']} {body.get('reason', '')}".rstrip())
        return dict(body)

    def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        self.requests.append(f"delete {kind}")
        del self.objects[kind, name]


def _fields(value: Any) -> Any:
    return {f"f:{name}": _fields(inner) for name, inner in value.items()} if isinstance(value, dict) else {}


class World:
    """The fake, and an operator that works on it."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.kube: Any = FakeKube()
        self.document = document
        self.leading = True
        self.reported: Reported | None = None
        self.engines: dict[str, EngineStates] = {}
        self.asked_for_engines: list[Any] = []
        self.now = NOON
        self.context = PlanningContext(Catalogue.load())
        self.kube.seen({**document, "metadata": {**document["metadata"], "uid": "u"}})
        self.restart()

    def restart(self) -> None:
        self.store = Store(MANAGER, INSTANCE)
        Informer(self.kube, self.store).relist()
        writer = Writer(self.kube, self.store, lambda: self.leading)

        def engines(*pod_key: Any) -> dict[str, EngineStates]:
            self.asked_for_engines.append(pod_key)
            return self.engines

        self.cluster = Cluster(self.kube, self.store, writer, reported=lambda *_: self.reported, engines=engines)
        self.kube.requests.clear()

    def reconcile(self) -> tuple[Outcome, list[str]]:
        self.kube.requests.clear()
        return reconcile(self.cluster, self.context, KEY, self.now), list(self.kube.requests)

    def change(self, kind: str, **parts: Any) -> None:
        live = self.kube.objects[kind, "demo"]
        self.store.put(self.kube.seen({**live, **parts}))

    def pod(self, **status: Any) -> None:
        """The endpoint's pod has this status."""
        template = self.kube.objects["Deployment", "demo"]["spec"]["template"]
        labels = {**template["metadata"]["labels"], "pod-template-hash": "1"}
        metadata = {
            "name": "demo-1",
            "namespace": "default",
            "labels": labels,
            "creationTimestamp": "2026-01-01T12:00:00Z",
        }
        self.store.put(
            self.kube.seen({"kind": "Pod", "metadata": metadata, "spec": template["spec"], "status": status})
        )

    def spec(self, **spec: Any) -> None:
        live = self.kube.objects[KIND, "demo"]
        live["metadata"]["generation"] += 1
        self.change(KIND, spec={**live["spec"], **spec})

    def ready(self) -> Any:
        return self.kube.objects[KIND, "demo"]["status"]["conditions"][-1]

    def serve(self) -> None:
        replicas = self.kube.objects["Deployment", "demo"]["spec"]["replicas"]
        names = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas", "observedGeneration")
        self.change("Deployment", status={**dict.fromkeys(names, replicas), "observedGeneration": 99})


@pytest.fixture
def world(document: Any) -> World:
    return World(document())


def test_it_is_made_once_and_then_nothing_is_asked(world: World) -> None:
    outcome, requests = world.reconcile()
    assert outcome is Outcome.MOVING
    assert [each for each in requests if each.startswith("apply")] == [
        "apply ServiceAccount", "apply Service", "apply NetworkPolicy", "apply Deployment",
        f"apply {KIND}/status",
    ]  # fmt: skip
    assert requests[-1] == "create Event RollingOut"
    assert world.reconcile() == (Outcome.MOVING, [])
    world.serve()
    outcome, requests = world.reconcile()
    assert (outcome, requests) == (Outcome.SETTLED, [f"apply {KIND}/status", "create Event Ready"])
    assert world.reconcile() == (Outcome.SETTLED, [])
    world.restart()
    assert world.reconcile() == (Outcome.SETTLED, [])


def test_an_engine_that_does_not_tell_its_blocks_is_asked_again_for_a_while(world: World) -> None:
    world.reconcile()
    world.pod(conditions=[{"type": "Ready", "status": "True"}], podIP="10.0.0.9")
    world.serve()
    assert world.reconcile()[0] is Outcome.MOVING
    world.now += timedelta(minutes=3)
    assert world.reconcile()[0] is Outcome.SETTLED
    world.reported = Reported(1234, "fp8_e4m3", "Q8_0, F16")
    for _ in range(2):
        assert world.reconcile()[0] is Outcome.SETTLED
        engine_status = world.kube.objects[KIND, "demo"]["status"]["workloads"][0]["engine"]
        assert (engine_status["kvBlocks"], engine_status["kvCacheDtype"], engine_status["weights"]) == (
            1234,
            "fp8_e4m3",
            "Q8_0, F16",
        )
        world.restart()
        world.reported = None  # what was reported once stays in the status


def test_pods_with_several_ranks_are_watched(document: Any) -> None:
    world = World(document(parallelism={"tensor": 2, "data": 2}))
    world.reconcile()
    assert world.asked_for_engines[-1] == (KEY, "main", {}), "nothing is ready"
    world.pod(conditions=[{"type": "Ready", "status": "True"}], podIP="10.0.0.9")
    world.serve()
    world.reconcile()
    assert world.asked_for_engines[-1] == (KEY, "main", {"demo-1": "http://10.0.0.9:8000/metrics"})
    world.engines = {"demo-1": EngineStates((EngineState(0, True, 2, kv_blocks=9), EngineState(1, False, 2)))}
    world.reconcile()
    status = world.kube.objects[KIND, "demo"]["status"]
    engine = status["workloads"][0]["engine"]
    assert (engine["copies"], engine["servingCopies"]) == (2, 1)
    assert ("Degraded", "True") in {(each["type"], each["status"]) for each in status["conditions"]}
    world.spec(parallelism={"tensor": 1})
    world.serve()
    world.engines = {}
    world.reconcile()
    assert world.asked_for_engines[-1] == (KEY, "main", {})
    status = world.kube.objects[KIND, "demo"]["status"]
    assert "copies" not in status["workloads"][0]["engine"]
    assert "Degraded" not in {each["type"] for each in status["conditions"]}


def test_an_engine_is_asked_again_after_an_upgrade(world: World) -> None:
    def engine_status() -> dict[str, Any]:
        world.reconcile()
        found: dict[str, Any] = world.kube.objects[KIND, "demo"]["status"]["workloads"][0]["engine"]
        return {name: value for name, value in found.items() if name != "args"}

    world.reconcile()
    world.pod(conditions=[{"type": "Ready", "status": "True"}], podIP="10.0.0.9")
    world.serve()
    world.reported = Reported(1234)
    assert engine_status() == {"kvBlocks": 1234}  # all that an earlier operator asked for
    world.restart()
    world.reported = None
    assert engine_status() == {"kvBlocks": 1234}
    world.reported = Reported(1234, "float32", "F16")
    assert engine_status() == {"kvBlocks": 1234, "kvCacheDtype": "float32", "weights": "F16"}
    world.reported = Reported(99, "bfloat16", "Q8_0")
    assert engine_status()["kvBlocks"] == 1234
    world.spec(engine={"image": "another:1"})  # the same words for another engine
    world.reconcile()
    world.serve()
    assert engine_status() == {"kvBlocks": 99, "kvCacheDtype": "bfloat16", "weights": "Q8_0"}


def test_other_runtimes_do_not_tell_their_weights(document: Any) -> None:
    engine = {"runtime": "vllm", "image": "vllm/vllm-openai-cpu:v0"}
    world = World(document(model={"source": "pvc://models/mine"}, engine=engine))
    world.reconcile()
    world.pod(conditions=[{"type": "Ready", "status": "True"}], podIP="10.0.0.9")
    world.serve()
    world.reported = Reported(1234, "auto")
    for _ in range(2):
        world.reconcile()
        engine_status = world.kube.objects[KIND, "demo"]["status"]["workloads"][0]["engine"]
        assert (engine_status["kvBlocks"], engine_status["kvCacheDtype"]) == (1234, "auto")
        world.reported = Reported(99)  # it is not asked again


def test_what_is_wrong_with_pods_of_an_older_spec_is_not_told_of_the_new_one(world: World) -> None:
    world.reconcile()
    waiting = {"reason": "ErrImagePull", "message": "no such image"}
    world.pod(containerStatuses=[{"name": "engine", "state": {"waiting": waiting}}])
    world.change("Deployment", status={"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1})
    world.reconcile()
    assert world.ready()["reason"] == "ImagePullError"
    world.spec(engine={"image": "another"})
    world.reconcile()
    assert world.ready()["reason"] == "RollingOut"
    # The Deployment has taken it up, and the older pod is still there.
    world.change("Deployment", status={"observedGeneration": 2, "replicas": 1, "updatedReplicas": 0})
    world.reconcile()
    assert world.ready()["reason"] == "RollingOut"


def test_a_newer_operator_writes_nothing(world: World) -> None:
    world.reconcile()
    world.serve()
    world.reconcile()
    catalogue = world.context.catalogue
    runtimes = {**catalogue.runtimes, "stoker": {"cpu": "stoker/engine-cpu:99"}}
    world.context = PlanningContext(catalogue.model_copy(update={"runtimes": runtimes}))
    world.restart()
    _, requests = world.reconcile()
    assert requests == [f"apply {KIND}/status"]  # which says that a newer image waits
    assert world.reconcile() == (Outcome.SETTLED, [])
    world.spec(engine={"maxNumSeqs": 4})
    world.reconcile()
    (container,) = world.kube.objects["Deployment", "demo"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "stoker/engine-cpu:99"


def test_scaling_does_not_take_the_newer_image(world: World) -> None:
    world.reconcile()
    world.context = PlanningContext(
        world.context.catalogue.model_copy(update={"runtimes": {"stoker": {"cpu": "stoker/engine-cpu:99"}}})
    )
    world.spec(replicas=3)
    _, requests = world.reconcile()
    assert "apply PodDisruptionBudget" in requests
    deployment = world.kube.objects["Deployment", "demo"]
    assert deployment["spec"]["replicas"] == 3
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == "stoker/engine-cpu:0.1.0"
    world.spec(replicas=1)
    _, requests = world.reconcile()
    assert "delete PodDisruptionBudget" in requests


def test_who_lost_the_lead_writes_nothing(world: World) -> None:
    world.leading = False
    with pytest.raises(NotLeading):
        world.reconcile()
    assert not [each for each in world.kube.requests if not each.startswith("get")]


@pytest.mark.parametrize("use", ["Restricted", "None"])
def test_a_stricter_policy_stops_nothing_that_runs(document: Any, use: Any) -> None:
    world = World(document(template={"spec": {"hostPID": True}}))
    world.reconcile()
    world.serve()
    assert world.reconcile()[0] is Outcome.SETTLED
    world.context = dataclasses.replace(world.context, policy=Policy(template=use))
    world.restart()
    _, requests = world.reconcile()
    assert requests == [f"apply {KIND}/status", "create Event TemplateNotPermitted"]
    assert world.ready()["message"].startswith("spec.template.spec")
    assert world.kube.objects["Deployment", "demo"]["spec"]["template"]["spec"]["hostPID"] is True
    world.spec(template={})
    _, requests = world.reconcile()
    assert "apply Deployment" in requests
    assert "hostPID" not in world.kube.objects["Deployment", "demo"]["spec"]["template"]["spec"]


def test_the_networks_policy_comes_and_goes_and_pods_do_not(world: World) -> None:
    world.reconcile()
    world.spec(networkPolicy={"mode": "None"}, service={"type": "NodePort"})
    _, requests = world.reconcile()
    assert [each for each in requests if "NetworkPolicy" in each] == ["delete NetworkPolicy"]
    assert "apply Deployment" not in requests
    world.spec(networkPolicy={"mode": "Open"})
    _, requests = world.reconcile()
    assert "apply NetworkPolicy" in requests and "apply Deployment" not in requests
    world.spec(networkPolicy={})  # a node's port, and nobody from outside may come
    _, requests = world.reconcile()
    assert requests == [f"apply {KIND}/status", "create Event Invalid"]
    assert "from" not in world.kube.objects["NetworkPolicy", "demo"]["spec"]["ingress"][0]


def test_pods_that_the_api_server_refuses_are_the_templates_fault(document: Any) -> None:
    world = World(document(template={"spec": {"nodeSelectr": {}}}))
    world.kube.refuse["Deployment"] = ".spec.template.spec.nodeSelectr: field not declared in schema"
    outcome, requests = world.reconcile()
    assert outcome is Outcome.REFUSED
    assert "check Deployment" in requests
    assert not [each for each in requests if each.startswith("apply") and "status" not in each]  # nothing by halves
    assert world.ready()["reason"] == "InvalidTemplate"
    assert "spec.template: " in world.ready()["message"] and "nodeSelectr" in world.ready()["message"]
    world.kube.refuse.clear()
    world.spec(template={"spec": {"nodeSelector": {"disk": "ssd"}}})
    world.reconcile()
    assert world.ready()["reason"] == "RollingOut"


def test_an_unlabelled_object_of_the_name_is_somebody_elses(world: World) -> None:
    theirs = {"kind": "Service", "metadata": {"name": "demo", "namespace": "default"}, "spec": {"selector": {"a": "b"}}}
    world.kube.seen(theirs)
    outcome, requests = world.reconcile()
    assert outcome is Outcome.MOVING  # it is looked at again
    assert world.ready()["reason"] == "NameConflict"
    assert not [each for each in requests if each.startswith("apply") and "status" not in each]
    assert world.kube.objects["Service", "demo"]["spec"] == {"selector": {"a": "b"}}


@pytest.mark.parametrize("generation", [1, 7])
def test_objects_that_lost_their_owner_are_adopted(world: World, generation: int) -> None:
    world.reconcile()
    world.serve()
    made = [kind for kind, name in world.kube.objects if name == "demo" and kind != KIND]
    assert len(made) > 3
    for kind in made:
        metadata = dict(world.kube.objects[kind, "demo"]["metadata"])
        del metadata["ownerReferences"]
        if kind == "Deployment":
            metadata["annotations"] = metadata["annotations"] | {GENERATION: str(generation)}
        world.change(kind, metadata=metadata)
    template = world.kube.objects["Deployment", "demo"]["spec"]["template"]
    world.reconcile()
    for kind in made:
        (reference,) = world.kube.objects[kind, "demo"]["metadata"]["ownerReferences"]
        assert reference["uid"] == world.kube.objects[KIND, "demo"]["metadata"]["uid"], kind
    assert world.kube.objects["Deployment", "demo"]["spec"]["template"] == template, "no pod is restarted"
    assert world.ready()["reason"] == "Ready"
    assert world.reconcile()[1] == []


def test_an_object_that_only_looks_like_ours_is_not_adopted(world: World) -> None:
    world.reconcile()
    live = world.kube.objects["Deployment", "demo"]
    metadata = {name: value for name, value in live["metadata"].items() if name != "ownerReferences"}
    selector = {"matchLabels": {"app": "theirs"}}
    world.change("Deployment", metadata=metadata, spec={**live["spec"], "selector": selector})
    world.reconcile()
    assert world.ready()["reason"] == "NameConflict"


def test_what_somebody_changed_is_put_back(world: World) -> None:
    world.reconcile()
    live = world.kube.objects["Deployment", "demo"]
    record = json.loads(live["metadata"]["annotations"][ANNOTATION])
    assert record["template"] == live["spec"]["template"]
    changed = copy.deepcopy(live["spec"])
    changed["template"]["spec"]["containers"][0]["image"] = "theirs"
    world.change("Deployment", spec=changed)
    _, requests = world.reconcile()
    assert requests == ["apply Deployment"]


def test_a_change_just_before_our_status_is_not_lost(world: World) -> None:
    """It is in the answer to our write, so that the watch brings no news of it."""
    world.reconcile()
    world.serve()
    apply = world.kube.apply

    def change_first(body: Any, *words: Any, **options: Any) -> Any:
        if body["kind"] == KIND:
            world.kube.apply = apply
            live = world.kube.objects[KIND, "demo"]
            live["metadata"]["generation"] += 1
            world.kube.seen({**live, "spec": {**live["spec"], "replicas": 3}})
        return apply(body, *words, **options)

    world.kube.apply = change_first
    assert world.reconcile()[0] is Outcome.CHANGED
    assert not world.store.put(world.kube.objects[KIND, "demo"]), "the watch's event"
    world.reconcile()
    assert world.kube.objects["Deployment", "demo"]["spec"]["replicas"] == 3


def test_why_there_is_no_room_counts_everybodys_pods_and_asks_only_then(document: Any) -> None:
    hardware = {"accelerator": "nvidia-l4", "count": 2}
    world = World(document(hardware=hardware, engine={"image": "x"}))
    node = {"metadata": {"name": "big"}, "spec": {}, "status": {"allocatable": {"nvidia.com/gpu": "4"}}}
    node["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    requests = []
    cluster = world.cluster
    world.cluster = dataclasses.replace(
        cluster, holders=lambda: requests.append(1) or [Holder("other/job", "big", {"nvidia.com/gpu": 3})]
    )
    world.store.put(world.kube.seen({**node, "kind": "Node"}))
    world.reconcile()
    world.change("Deployment", status={"observedGeneration": 9, "replicas": 1, "updatedReplicas": 1})
    world.reconcile()
    assert not requests
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    world.pod(conditions=[scheduled])
    # Somebody's who has put our label onto it.
    labels = {"app.kubernetes.io/managed-by": "stoker"}
    metadata = {"name": "odd", "namespace": "x", "labels": labels, "creationTimestamp": "2026-01-01T12:00:00Z"}
    container = {"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    odd = {"kind": "Pod", "metadata": metadata, "spec": {"nodeName": "big", "containers": [container]}}
    world.store.put(world.kube.seen(odd))
    world.reconcile()
    assert "1 of 4 free on big, held by other/job (3)" in world.ready()["message"]


# ---- others that lead before and after us


def test_who_sees_an_older_spec_than_the_deployment_was_made_of_renders_none_of_it(world: World) -> None:
    """A standby whose watch of endpoints is behind takes over."""
    world.reconcile()
    world.serve()
    stale = world.store.get(KIND, *KEY)
    world.spec(engine={"maxNumSeqs": 4}, replicas=2)
    world.reconcile()
    before = copy.deepcopy(world.kube.objects["Deployment", "demo"])
    world.store = Store(MANAGER, INSTANCE)
    for live in world.kube.objects.values():
        world.store.put(live if live["kind"] != KIND else stale)
    world.cluster = Cluster(world.kube, world.store, Writer(world.kube, world.store))
    _, requests = world.reconcile()
    assert requests[0] == f"list {KIND}"
    assert not [each for each in requests if each.startswith("apply") and "status" not in each]
    assert world.kube.objects["Deployment", "demo"] == before
    del world.kube.objects[KIND, "demo"]
    world.store.put(stale)
    assert world.reconcile() == (Outcome.GONE, [f"list {KIND}"]), "nor of one that is gone"


def test_who_sees_nothing_new_at_all_is_refused_by_the_api_server(world: World) -> None:
    """Its request was under way while the next one led: both the endpoint and the Deployment that it saw are old."""
    world.reconcile()
    seen = {kind: world.store.get(kind, *KEY) for kind in (KIND, "Deployment")}
    world.spec(engine={"maxNumSeqs": 4})
    world.reconcile()
    before = copy.deepcopy(world.kube.objects["Deployment", "demo"])
    world.store = Store(MANAGER, INSTANCE)
    deployment: Any = copy.deepcopy(seen["Deployment"])
    deployment["spec"]["replicas"] = 7  # something to put right
    for live in (seen[KIND], deployment, *(world.kube.objects[each, "demo"] for each in ("Service", "ServiceAccount"))):
        world.store.put(live)
    world.cluster = Cluster(world.kube, world.store, Writer(world.kube, world.store))
    with pytest.raises(KubeError, match="modified"):
        world.reconcile()
    assert world.kube.objects["Deployment", "demo"] == before
    world.reconcile()
    assert world.kube.objects["Deployment", "demo"] == before, "and then it sees"


def test_a_status_that_changes_while_we_write_is_no_reason_to_give_up(world: World) -> None:
    world.reconcile()
    live = world.kube.objects["Deployment", "demo"]
    world.kube.seen({**live, "status": {"replicas": 1}})  # nobody has told us yet
    world.spec(replicas=3)
    world.reconcile()
    live = world.kube.objects["Deployment", "demo"]
    assert live["spec"]["replicas"] == 3
    assert live["metadata"]["annotations"][GENERATION] == "2"


def test_a_generation_that_somebody_made_up_stops_nothing(world: World) -> None:
    world.reconcile()
    for made_up in ("99", "many", "-1", "²", "9" * 30):
        metadata = world.kube.objects["Deployment", "demo"]["metadata"]
        annotations = {**metadata["annotations"], GENERATION: made_up}
        world.change("Deployment", metadata={**metadata, "annotations": annotations}, spec={"replicas": 5})
        world.reconcile()
        live = world.kube.objects["Deployment", "demo"]
        assert (live["metadata"]["annotations"][GENERATION], live["spec"]["replicas"]) == ("1", 1)


def test_a_generation_that_changes_nothing_of_the_deployment_writes_none(world: World) -> None:
    world.reconcile()
    world.spec(service={"port": 9000})
    _, requests = world.reconcile()
    assert "apply Service" in requests and "apply Deployment" not in requests


# ---- a hub model, whose description may come late

LARGE, SMALL = table()["meta-llama/Llama-3.1-70B-Instruct"], table()["meta-llama/Llama-3.2-1B-Instruct"]


class Hub:
    """A model's description, on its way."""

    def __init__(self) -> None:
        self.config: Any = None
        self.pending = True

    def world(self, document: Any, **spec: Any) -> World:
        model = {"source": "hf://org/model"}
        hardware = {"accelerator": "nvidia-l4", "count": 1}
        made = World(document(model=model, hardware=hardware, engine={"image": "x"}, **spec))
        made.context = PlanningContext(
            made.context.catalogue, lambda *_: self.config, pending=lambda *_: self.pending and self.config is None
        )
        return made


@pytest.mark.parametrize("config", [SMALL, None], ids=["it comes", "it does not"])
def test_first_pods_wait_for_the_first_attempt(document: Any, config: Any) -> None:
    hub = Hub()
    world = hub.world(document)
    outcome, requests = world.reconcile()
    assert (outcome, requests[:1]) == (Outcome.HELD, [f"apply {KIND}/status"])
    assert world.reconcile() == (Outcome.HELD, []), "waiting costs no request"
    assert world.ready()["reason"] == "RollingOut"
    hub.config, hub.pending = config, False
    assert world.reconcile()[0] is Outcome.MOVING
    timely = World(world.document)
    timely.context = world.context
    timely.reconcile()
    made = [each.kube.objects["Deployment", "demo"]["spec"] for each in (world, timely)]
    assert made[0] == made[1]


def test_a_change_waits_too_and_what_runs_goes_on(document: Any) -> None:
    hub = Hub()
    world = hub.world(document)
    hub.config = SMALL
    world.reconcile()
    world.serve()
    hub.config = None
    world.spec(replicas=2)
    assert world.reconcile()[0] is not Outcome.HELD, "the pods of this spec are known"
    world.serve()
    world.reconcile()
    world.spec(model={"source": "hf://org/other"})
    outcome, requests = world.reconcile()
    assert (outcome, "apply Deployment" in requests) == (Outcome.HELD, False)
    assert world.ready()["status"] == "False"
    hub.config = LARGE
    _, requests = world.reconcile()
    assert world.ready()["reason"] == "DoesNotFit"
    assert not [each for each in requests if each.startswith("delete")], "what served stays"


def test_what_waited_in_vain_and_cannot_fit_holds_no_accelerator(document: Any) -> None:
    hub = Hub()
    world = hub.world(document)
    hub.pending = False
    world.reconcile()
    hub.config = LARGE
    _, requests = world.reconcile()
    assert [each for each in requests if each.startswith(("delete", "apply"))] == [
        "delete Deployment",
        f"apply {KIND}/status",
    ]
    assert world.ready()["reason"] == "DoesNotFit"
    assert world.reconcile() == (Outcome.SETTLED, [])


@pytest.mark.parametrize("evidence", ["serves", "was complete", "was reported", "another spec"])
def test_what_once_served_is_never_removed(document: Any, evidence: str) -> None:
    hub = Hub()
    world = hub.world(document)
    hub.pending = False
    world.reconcile()
    if evidence == "serves":
        world.change("Deployment", status={"readyReplicas": 1})
    elif evidence == "was complete":
        progressing = {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}
        world.change("Deployment", status={"conditions": [progressing]})
    elif evidence == "was reported":
        world.serve()
        world.now += timedelta(minutes=5)
        world.reconcile()
        world.change("Deployment", status={})
        world.now += timedelta(minutes=5)
        world.reconcile()
    else:
        world.spec(model={"source": "hf://org/other"})
    hub.config = LARGE
    _, requests = world.reconcile()
    assert world.ready()["reason"] == "DoesNotFit"
    assert not [each for each in requests if each.startswith("delete")]


def test_an_endpoint_on_its_way_out_is_left_to_its_owner_references(world: World) -> None:
    live = world.kube.objects[KIND, "demo"]
    live["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    world.change(KIND)
    assert world.reconcile() == (Outcome.GONE, [])


def test_a_route_opens_the_network_and_replaces_no_pod(document: Any) -> None:
    world = World(document())
    world.reconcile()
    gateway = GatewaySettings("https://models.example.com", "system", "gateway")
    world.context = dataclasses.replace(world.context, route=Route("Routed", "the gateway serves it", gateway))
    assert world.reconcile()[1] == ["apply NetworkPolicy", "apply InferenceEndpoint/status"]
    assert world.reconcile()[1] == []
    world.context = dataclasses.replace(world.context, route=Route("NameTaken", "it is taken"))
    assert world.reconcile()[1] == ["apply NetworkPolicy", "apply InferenceEndpoint/status"]
