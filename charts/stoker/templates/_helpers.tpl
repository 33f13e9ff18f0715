{{- define "stoker.name" -}}
{{- if contains "stoker" .Release.Name }}{{ .Release.Name | trunc 54 | trimSuffix "-" }}{{ else }}{{ printf "%s-stoker" (.Release.Name | trunc 46 | trimSuffix "-") }}{{ end -}}
{{- end }}

{{- /* The webhook's Service, and the Secret with its certificate. */ -}}
{{- define "stoker.webhook" -}}
{{ include "stoker.name" . }}-webhook
{{- end }}

{{- define "stoker.selector" -}}
app.kubernetes.io/name: stoker-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "stoker.labels" -}}
{{ include "stoker.selector" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- /* An image with the registry before it, where it names none: its first part is no host. */ -}}
{{- define "stoker.image" -}}
{{- $first := splitList "/" .image | first -}}
{{- $named := and (contains "/" .image) (or (contains "." $first) (contains ":" $first) (eq $first "localhost")) -}}
{{- if and .root.Values.images.registry (not $named) }}{{ .root.Values.images.registry }}/{{ end }}{{ .image -}}
{{- end }}

{{- define "stoker.operatorImage" -}}
{{- $tag := .Values.images.tag | default .Chart.AppVersion -}}
{{ include "stoker.image" (dict "root" . "image" (.Values.images.operator | default (printf "stoker/operator:%s" $tag))) }}
{{- end }}

{{- /* The gateway: its objects' name, its labels, its image, and where clients of the cluster reach it. */ -}}
{{- define "stoker.gateway" -}}
{{ include "stoker.name" . }}-gateway
{{- end }}

{{- define "stoker.gatewaySelector" -}}
app.kubernetes.io/name: stoker-gateway
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "stoker.gatewayLabels" -}}
{{ include "stoker.gatewaySelector" . }}
app.kubernetes.io/component: gateway
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "stoker.gatewayImage" -}}
{{- $tag := .Values.images.tag | default .Chart.AppVersion -}}
{{ include "stoker.image" (dict "root" . "image" (.Values.images.gateway | default (printf "stoker/gateway:%s" $tag))) }}
{{- end }}

{{- define "stoker.gatewayPort" -}}
{{ .Values.gateway.service.port | default (ternary 443 80 .Values.gateway.tls.enabled) }}
{{- end }}

{{- define "stoker.gatewayURL" -}}
{{- $port := include "stoker.gatewayPort" . -}}
{{- $usual := ternary "443" "80" .Values.gateway.tls.enabled -}}
{{- $at := printf "%s.%s.svc%s" (include "stoker.gateway" .) .Release.Namespace (ternary "" (printf ":%s" $port) (eq $port $usual)) -}}
{{ .Values.gateway.url | default (printf "%s://%s" (ternary "https" "http" .Values.gateway.tls.enabled) $at) | trimSuffix "/" }}
{{- end }}

{{- /* What is laid over the operator's built-in catalogue. */ -}}
{{- define "stoker.catalogue" -}}
{{- $images := dict -}}
{{- range $kind, $image := .Values.images.engine }}{{ if $image }}{{ $_ := set $images $kind $image }}{{ end }}{{ end -}}
{{- $runtimes := deepCopy .Values.catalogue.runtimes -}}
{{- $stoker := get $runtimes "stoker" | default dict -}}
{{- range $kind, $image := $stoker }}{{ if hasKey $images $kind }}
{{- fail (printf "images.engine.%s and catalogue.runtimes.stoker.%s both name an image; set one of them" $kind $kind) }}
{{- end }}{{ end -}}
{{- $default := dict "cpu" (printf "stoker/engine-cpu:%s" (.Values.images.tag | default .Chart.AppVersion)) -}}
{{- $_ := set $runtimes "stoker" (merge dict $images $stoker $default) -}}
accelerators: {{ toJson .Values.catalogue.accelerators }}
supports: {{ toJson .Values.catalogue.supports }}
releases: {{ toJson .Values.catalogue.releases }}
runtimes: {{ toJson $runtimes }}
{{- with .Values.images.registry }}
registry: {{ . | quote }}
{{- end }}
{{- end }}

{{- /* What endpoints are permitted, and what is added to their objects. */ -}}
{{- define "stoker.policy" -}}
{{- $namespace := dict "matchLabels" (dict "kubernetes.io/metadata.name" .Release.Namespace) -}}
{{- $operator := dict "namespaceSelector" $namespace "podSelector" (dict "matchLabels" (include "stoker.selector" . | fromYaml)) -}}
template: {{ .Values.policy.template | quote }}
podIds: {{ .Values.policy.podIds | quote }}
podMonitors: {{ eq .Values.monitoring.kind "PodMonitor" }}
podMonitorLabels: {{ .Values.monitoring.endpointLabels | toJson }}
{{- $others := concat (.Values.networkPolicy.prometheus | default list) (.Values.networkPolicy.gateway | default list) }}
networkPolicyFrom: {{ prepend $others $operator | toJson }}
{{- end }}

{{- /* Whether there are monitors of the kind that the values name; empty: there are none. */ -}}
{{- define "stoker.monitored" -}}
{{- $known := .Capabilities.APIVersions.Has (printf "monitoring.coreos.com/v1/%s" .Values.monitoring.kind) -}}
{{- if or (eq .Values.monitoring.podMonitor "Enabled") (and (eq .Values.monitoring.podMonitor "Auto") $known) }}yes{{ end -}}
{{- end }}

{{- /* Annotations of what `helm test` makes. */ -}}
{{- define "stoker.testHook" }}
    helm.sh/hook: test
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}

{{- /* Annotations of what applies the endpoints of the values. */ -}}
{{- define "stoker.endpointsHook" }}
    helm.sh/hook: post-install,post-upgrade
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}
