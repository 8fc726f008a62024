{{/* Name of all objects of the operator. The name of a release has at most 53 characters. */}}
{{- define "orca.name" -}}
{{ .Release.Name }}-operator
{{- end }}

{{/* Labels by which Service, policy and monitor select the operator's pod. */}}
{{- define "orca.selector" -}}
app.kubernetes.io/name: orca-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "orca.labels" -}}
{{ include "orca.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Fields of metadata: name, namespace and labels of an object of the operator. */}}
{{- define "orca.metadata" -}}
name: {{ include "orca.name" . }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "orca.labels" . | nindent 2 }}
{{- end }}

{{- define "orca.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (ternary (include "orca.name" .) "default" .Values.serviceAccount.create) -}}
{{- end }}

{{/* Full reference of an image: (list $ "gateway"). A reference with a tag or a digest is used unchanged. */}}
{{- define "orca.image" -}}
{{- $root := index . 0 -}}
{{- $images := $root.Values.images -}}
{{- $image := index $images (index . 1) -}}
{{- if regexMatch "(:[^/]+|@[^/]+)$" $image -}}
{{ $image }}
{{- else -}}
{{ with $images.registry }}{{ . }}/{{ end }}{{ $image }}:{{ $images.tag | default $root.Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* Namespaces of the monitored pods, in the form that monitors use. */}}
{{- define "orca.namespaceSelector" -}}
{{- if .Values.namespaces -}}
matchNames: {{ toJson .Values.namespaces }}
{{- else -}}
any: true
{{- end -}}
{{- end }}
