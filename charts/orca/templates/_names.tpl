{{/*
The release's name as the beginning of the name of a Service, which has neither dots nor a digit in front. Helm allows
both in the name of a release.
*/}}
{{- define "orca.releaseName" -}}
{{ regexReplaceAll "^([0-9])" (.Release.Name | replace "." "-") "orca-${1}" }}
{{- end }}

{{/* Name of all objects of the operator. The name of a Service has at most 63 characters. */}}
{{- define "orca.name" -}}
{{- $suffix := .Values.nameOverride | default "operator" -}}
{{- $name := .Values.fullnameOverride | default (printf "%s-%s" (include "orca.releaseName" .) $suffix) -}}
{{- if gt (len $name) 63 -}}
{{- fail (printf "the objects of the operator would be named %s, which has %d characters, and the name of a Service has at most 63; choose a shorter name for the release, or set fullnameOverride" $name (len $name)) -}}
{{- end -}}
{{ $name }}
{{- end }}

{{/* Labels by which Service, policy and monitor select the operator's pod. */}}
{{- define "orca.selector" -}}
app.kubernetes.io/name: orca-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "orca.ownLabels" -}}
{{ include "orca.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Labels of an object: (list $ MORE). Values may not change those of the chart, by which objects find each other. */}}
{{- define "orca.labels" -}}
{{- $root := index . 0 -}}
{{- $own := include "orca.ownLabels" $root | fromYaml -}}
{{- range $key, $_ := merge dict (index . 1) $root.Values.commonLabels -}}
{{- if hasKey $own $key -}}
{{- fail (printf "commonLabels, operator.podLabels and the labels of monitoring: the chart sets the label %s itself; choose another key" $key) -}}
{{- end -}}
{{- end -}}
{{ toYaml (merge dict $own (index . 1) $root.Values.commonLabels) }}
{{- end }}

{{/*
Fields of metadata of an object, from a dict with:
root         the context of the template
name         default: that of all objects of the operator
namespace    default: that of the release; "" for an object without one
labels, annotations   more of them; optional
*/}}
{{- define "orca.metadata" -}}
name: {{ get . "name" | default (include "orca.name" .root) | quote }}
{{- with ternary (get . "namespace") .root.Release.Namespace (hasKey . "namespace") }}
namespace: {{ . | quote }}
{{- end }}
labels:
  {{- include "orca.labels" (list .root (get . "labels" | default dict)) | nindent 2 }}
{{- with merge dict (get . "annotations" | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
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
