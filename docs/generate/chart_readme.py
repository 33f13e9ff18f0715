"""The chart's README, from Chart.yaml and the page of its values."""

from __future__ import annotations

import chart_values
import yaml

_TEXT = """\
<!-- Generated from Chart.yaml, values.yaml and values.schema.json by `make generate`; do not edit. -->
# stoker

{description}.

This chart installs Stoker's operator, its CustomResourceDefinition InferenceEndpoint and, with `gateway.enabled`, the
gateway: one address for the models of all endpoints. It needs Kubernetes {kubernetes} or newer, and nothing else. It
can use cert-manager, the Prometheus operator, Grafana and KEDA, if they are installed.

## Install, upgrade, uninstall

```sh
helm install stoker charts/stoker --namespace stoker-system --create-namespace \\
  --set images.registry=$REGISTRY,images.tag=dev
helm test stoker --namespace stoker-system
helm upgrade stoker charts/stoker --namespace stoker-system --reset-then-reuse-values
helm uninstall stoker --namespace stoker-system
```

Nodes pull the images from your registry, `REGISTRY`. Images are not published yet: `make images` builds them with the
tag `dev`; tag them `$REGISTRY/stoker/operator:dev`, `$REGISTRY/stoker/engine-cpu:dev` and, with the gateway,
`$REGISTRY/stoker/gateway:dev`, and push them.

Endpoints keep serving during an upgrade, and after an uninstall. The CustomResourceDefinition is part of the release,
so an upgrade updates it. An uninstall keeps it (`crds.keep`), since deleting it would delete all endpoints.

An endpoint for a first try, which `kubectl apply` creates in the current namespace:

```yaml
apiVersion: stoker.dev/v1alpha1
kind: InferenceEndpoint
metadata:
  name: demo
spec:
  model:
    source: demo://gemma-3-270m
  hardware:
    accelerator: cpu
```

## Values

{introduction}

{tables}"""


def page() -> str:
    """Return the README, in Markdown."""
    chart = yaml.safe_load((chart_values.CHART / "Chart.yaml").read_text(encoding="utf-8"))
    introduction, tables = chart_values.parts()
    return _TEXT.format(
        description=chart["description"],
        kubernetes=chart["kubeVersion"].removeprefix(">=").removesuffix(".0-0"),
        introduction=introduction,
        tables=tables.replace("## ", "### "),
    )
