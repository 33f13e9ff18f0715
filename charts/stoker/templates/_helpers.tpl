{{- define "stoker.name" -}}
{{- if contains "stoker" .Release.Name }}{{ .Release.Name | trunc 54 | trimSuffix "-" }}{{ else }}{{ printf "%s-stoker" (.Release.Name | trunc 46 | trimSuffix "-") }}{{ end -}}
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

{{- /* What is laid over the operator's built-in catalogue. */ -}}
{{- define "stoker.catalogue" -}}
{{- $images := dict "cpu" (printf "stoker/engine-cpu:%s" .Chart.AppVersion) -}}
{{- range $kind, $image := .Values.images.engine }}{{ if $image }}{{ $_ := set $images $kind $image }}{{ end }}{{ end -}}
runtimes:
  stoker: {{ toJson $images }}
accelerators: {{ toJson .Values.accelerators }}
{{- end }}
