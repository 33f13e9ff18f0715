"""The pod template of an endpoint: the operator's, merged with the user's template."""

from __future__ import annotations

import math
from typing import Final

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.manifests.engine_container import engine_container
from stoker_operator.manifests.node_affinity import node_affinity
from stoker_operator.manifests.pod_template_merge import merge_pod_spec
from stoker_operator.manifests.storage import API_KEYS_MOUNT, TEMPLATE_FILE, TEMPLATE_MOUNT, volumes
from stoker_operator.objects.owner import Manifest, Owner
from stoker_operator.plan.planner import Plan
from stoker_operator.policy.policy import PERMISSIVE, Policy
from stoker_operator.runtimes.registry import runtime

#: fsGroup of pods, with which they may write to volumes, whichever user the image runs as.
GROUP: Final = 65532
#: Time in seconds for a server to exit after its requests have finished; `_RANKS_TO_END` if it drains by itself and has
#: several ranks, which exit before it.
_TO_END: Final = 5
_RANKS_TO_END: Final = 10


def pod_template(owner: Owner, spec: Spec, plan: Plan, policy: Policy = PERMISSIVE) -> Manifest:
    """Return metadata and spec of the pods. `policy` decides whether they have user and group ids.

    Raises:
        Refused: a field of the spec cannot be applied.
    """
    engine = runtime(spec.engine.runtime)
    started = engine.invocation(
        spec,
        plan,
        chat_template=_chat_template(spec),
        api_keys=API_KEYS_MOUNT if spec.auth and engine.reads_key_files else None,
    )
    # A terminating pod still accepts requests while traffic is redirected, and then finishes its requests.
    leaving = math.ceil(started.grace) + spec.rollout.drain
    to_end = _RANKS_TO_END if engine.drains and plan.placement.sizes.used > 1 else _TO_END
    mounted = volumes(owner, spec, plan.placement, api_keys=engine.reads_key_files, shm=engine.needs_shm)
    accelerator = plan.placement.accelerator
    assigns = policy.pod_ids == "Operator"
    pod: Manifest = {
        "serviceAccountName": owner.object_name,
        "automountServiceAccountToken": False,
        # A Service named `hf` would otherwise set variables such as HF_PORT in every pod of the namespace.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": leaving + to_end,
        "securityContext": {
            "runAsNonRoot": True,
            **({"runAsUser": engine.user} if engine.user and assigns else {}),
            "seccompProfile": {"type": "RuntimeDefault"},
            # fsGroup makes a claim's volume writable for the image's user.
            **({"fsGroup": GROUP} if assigns else {}),
            "fsGroupChangePolicy": "OnRootMismatch",
        },
        "containers": [engine_container(spec, plan, started, mounted, leaving)],
        "volumes": [volume.volume() for volume in mounted],
    }
    affinity = node_affinity(accelerator.node_labels)
    if affinity:
        pod["affinity"] = affinity
    if accelerator.tolerations:
        pod["tolerations"] = [each.model_dump(by_alias=True, exclude_none=True) for each in accelerator.tolerations]
    template = spec.template
    metadata: Manifest = {"labels": {**(template.metadata.labels or {}), **owner.labels()}}
    if template.metadata.annotations:
        metadata["annotations"] = dict(template.metadata.annotations)
    return {"metadata": metadata, "spec": merge_pod_spec(pod, template.spec or {})}


def _chat_template(spec: Spec) -> str | None:
    """Return the chat template's text or the path of its mounted file, or None for the model's own template."""
    template = spec.model.chat_template
    if template is None:
        return None
    return template.value or f"{TEMPLATE_MOUNT}/{TEMPLATE_FILE}"
