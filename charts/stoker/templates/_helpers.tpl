{{- define "stoker.name" -}}
{{- if contains "stoker" .Release.Name }}{{ .Release.Name | trunc 54 | trimSuffix "-" | trimSuffix "." }}{{ else }}{{ printf "%s-stoker" (.Release.Name | trunc 46 | trimSuffix "-" | trimSuffix ".") }}{{ end -}}
{{- end }}

{{- /* The names of the Secret with the webhook's certificate, and of the webhook's Service. */ -}}
{{- define "stoker.webhook" -}}
{{ include "stoker.name" . }}-webhook
{{- end }}

{{- define "stoker.webhookService" -}}
{{ include "stoker.serviceName" (list (include "stoker.name" .) "-webhook") }}
{{- end }}

{{- define "stoker.selector" -}}
app.kubernetes.io/name: stoker-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "stoker.labels" -}}
{{ include "stoker.selector" . }}
app.kubernetes.io/component: operator
{{ include "stoker.releaseLabels" . }}
{{- end }}

{{- /* Versions may have build metadata (0.1.0+abc), which is not permitted in labels and image tags. */ -}}
{{- define "stoker.releaseLabels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | replace "+" "_" | trunc 63 | trimAll "-_." | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimAll "-_." | quote }}
{{- end }}

{{- /* Merges maps; a key of a later map replaces an earlier one's. */ -}}
{{- define "stoker.merged" -}}
{{- $all := dict }}
{{- range . }}{{ $all = mergeOverwrite $all (deepCopy (. | default dict)) }}{{ end }}
{{- with $all }}{{ toYaml . }}{{ end }}
{{- end }}

{{- /* The name of a Service or Job, at most 63 characters: a longer one is truncated and made unique by a hash. Arguments: the
owner's name, and a suffix. */ -}}
{{- define "stoker.shortName" -}}
{{- $owner := index . 0 }}
{{- $suffix := index . 1 }}
{{- if gt (len (print $owner $suffix)) 63 }}
{{- $owner = printf "%s-%s" (trunc (int (sub 54 (len $suffix))) $owner | trimSuffix "-") (sha256sum $owner | trunc 8) }}
{{- end }}
{{- print $owner $suffix }}
{{- end }}

{{- /* The name of a Service, which must start with a letter and have no dot, unlike a release's. Arguments as above. */ -}}
{{- define "stoker.serviceName" -}}
{{- $owner := index . 0 | replace "." "-" }}
{{- if not (regexMatch "^[a-z]" $owner) }}{{ $owner = print "s-" $owner }}{{ end }}
{{- include "stoker.shortName" (list $owner (index . 1)) }}
{{- end }}

{{- /* Scheduling of all pods of the chart. */ -}}
{{- define "stoker.scheduling" -}}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 0 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- end }}

{{- /* Numbers of the operator's and the gateway's pods. */ -}}
{{- define "stoker.replicas" -}}
{{ .Values.replicas | default 2 }}
{{- end }}

{{- define "stoker.gatewayReplicas" -}}
{{ .Values.gateway.replicas | default 2 }}
{{- end }}

{{- /* Topology spread of pods of one kind. Arguments: the root, and the template of their selector. */ -}}
{{- define "stoker.spread" -}}
{{- $root := index . 0 }}
{{- $selector := dict "matchLabels" (include (index . 1) $root | fromYaml) }}
{{- $usual := dict "topologyKey" "kubernetes.io/hostname" "maxSkew" 1 "whenUnsatisfiable" "ScheduleAnyway" }}
{{- range $root.Values.topologySpreadConstraints | default (list $usual) }}
{{ list (merge (dict "labelSelector" $selector) .) | toYaml }}
{{- end }}
{{- end }}

{{- /* An image. Unless its first part is a host, the registry is prepended. */ -}}
{{- define "stoker.image" -}}
{{- $first := splitList "/" .image | first -}}
{{- $named := and (contains "/" .image) (or (contains "." $first) (contains ":" $first) (eq $first "localhost")) -}}
{{- $registry := (.root.Values.images).registry -}}
{{- if and $registry (not $named) }}{{ $registry }}/{{ end }}{{ .image -}}
{{- end }}

{{- define "stoker.tag" -}}
{{ (.Values.images).tag | default (.Chart.AppVersion | replace "+" "_") }}
{{- end }}

{{- define "stoker.operatorImage" -}}
{{- $default := printf "stoker/operator:%s" (include "stoker.tag" .) -}}
{{ include "stoker.image" (dict "root" . "image" ((.Values.images).operator | default $default)) }}
{{- end }}

{{- define "stoker.gatewayPeers" -}}
{{ include "stoker.serviceName" (list (include "stoker.gateway" .) "-peers") }}
{{- end }}

{{- /* The gateway: its objects' name, its labels, its image, and its URL in the cluster. */ -}}
{{- define "stoker.gateway" -}}
{{ include "stoker.name" . }}-gateway
{{- end }}

{{- define "stoker.gatewayService" -}}
{{ include "stoker.serviceName" (list (include "stoker.gateway" .) "") }}
{{- end }}

{{- define "stoker.gatewaySelector" -}}
app.kubernetes.io/name: stoker-gateway
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "stoker.gatewayLabels" -}}
{{ include "stoker.gatewaySelector" . }}
app.kubernetes.io/component: gateway
{{ include "stoker.releaseLabels" . }}
{{- end }}

{{- define "stoker.gatewayImage" -}}
{{- $default := printf "stoker/gateway:%s" (include "stoker.tag" .) -}}
{{ include "stoker.image" (dict "root" . "image" ((.Values.images).gateway | default $default)) }}
{{- end }}

{{- define "stoker.gatewayPort" -}}
{{ (.Values.gateway.service).port | default (ternary 443 80 .Values.gateway.tls.enabled) }}
{{- end }}

{{- define "stoker.gatewayURL" -}}
{{- $port := include "stoker.gatewayPort" . -}}
{{- $usual := ternary "443" "80" .Values.gateway.tls.enabled -}}
{{- $at := printf "%s.%s.svc%s" (include "stoker.gatewayService" .) .Release.Namespace (ternary "" (printf ":%s" $port) (eq $port $usual)) -}}
{{ .Values.gateway.url | default (printf "%s://%s" (ternary "https" "http" .Values.gateway.tls.enabled) $at) | trimSuffix "/" }}
{{- end }}

{{- /* Additions and changes to the operator's built-in catalogue. */ -}}
{{- define "stoker.catalogue" -}}
{{- $images := dict -}}
{{- range $kind, $image := (.Values.images).engine }}{{ if $image }}{{ $_ := set $images $kind $image }}{{ end }}{{ end -}}
{{- $catalogue := .Values.catalogue | default dict -}}
{{- $runtimes := deepCopy ($catalogue.runtimes | default dict) -}}
{{- $stoker := get $runtimes "stoker" | default dict -}}
{{- range $kind, $image := $stoker }}{{ if hasKey $images $kind }}
{{- fail (printf "images.engine.%s and catalogue.runtimes.stoker.%s both set an image; remove one of them" $kind $kind) }}
{{- end }}{{ end -}}
{{- $default := dict "cpu" (printf "stoker/engine-cpu:%s" (include "stoker.tag" .)) -}}
{{- $_ := set $runtimes "stoker" (merge dict $images $stoker $default) -}}
accelerators: {{ $catalogue.accelerators | default dict | toJson }}
supports: {{ $catalogue.supports | default dict | toJson }}
releases: {{ $catalogue.releases | default dict | toJson }}
runtimes: {{ toJson $runtimes }}
{{- with (.Values.images).registry }}
registry: {{ . | quote }}
{{- end }}
{{- end }}

{{- /* Permissions of endpoints, and additions to their objects. */ -}}
{{- define "stoker.policy" -}}
{{- $namespace := dict "matchLabels" (dict "kubernetes.io/metadata.name" .Release.Namespace) -}}
{{- $operator := dict "namespaceSelector" $namespace "podSelector" (dict "matchLabels" (include "stoker.selector" . | fromYaml)) -}}
template: {{ .Values.policy.template | quote }}
podIds: {{ .Values.policy.podIds | default "Operator" | quote }}
podMonitors: {{ eq .Values.monitoring.kind "PodMonitor" }}
podMonitorLabels: {{ .Values.monitoring.endpointLabels | default dict | toJson }}
{{- $others := concat (.Values.networkPolicy.prometheus | default list) (.Values.networkPolicy.gateway | default list) }}
networkPolicyFrom: {{ prepend $others $operator | toJson }}
{{- end }}

{{- /* Whether there are monitors of the values' kind; empty: none. */ -}}
{{- define "stoker.monitored" -}}
{{- $known := .Capabilities.APIVersions.Has (printf "monitoring.coreos.com/v1/%s" .Values.monitoring.kind) -}}
{{- if or (eq .Values.monitoring.podMonitor "Enabled") (and (eq .Values.monitoring.podMonitor "Auto") $known) }}yes{{ end -}}
{{- end }}

{{- /* Labels of pods that run once: that of `helm test`, and those of the Job that applies the endpoints of the values. */ -}}
{{- define "stoker.testLabels" -}}
app.kubernetes.io/name: stoker-test
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "stoker.endpointsLabels" -}}
app.kubernetes.io/name: stoker-endpoints
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- /* Annotations of the objects of `helm test`. */ -}}
{{- define "stoker.testHook" }}
    helm.sh/hook: test
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}

{{- /* Annotations of the objects that apply the endpoints of the values. */ -}}
{{- define "stoker.endpointsHook" }}
    helm.sh/hook: post-install,post-upgrade
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}
