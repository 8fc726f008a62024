{{/* Grafana's JSON of the panels in monitoring/panels.yaml: width and height of a panel are 8 of 24 columns and 7 rows. */}}
{{- define "orca.dashboard" -}}
{{- $source := dict "type" "prometheus" "uid" "${source}" }}
{{- $chosen := `namespace=~"$namespace",orca_deployment=~"$deployment"` }}
{{- $panels := list }}
{{- range $index, $panel := .Files.Get "monitoring/panels.yaml" | fromYamlArray }}
{{- $targets := list }}
{{- range $legend, $query := $panel.queries }}
{{- $targets = append $targets (dict
      "refId" (printf "%c" (add 65 (len $targets)))
      "datasource" $source
      "expr" (replace "$of" $chosen $query)
      "legendFormat" $legend) }}
{{- end }}
{{- $defaults := dict "unit" $panel.unit }}
{{- if not $panel.signed }}
{{- $_ := set $defaults "min" 0 }}
{{- end }}
{{- if $panel.stacked }}
{{- $_ := set $defaults "custom" (dict "stacking" (dict "mode" "normal" "group" "A") "fillOpacity" 30) }}
{{- end }}
{{- $panels = append $panels (dict
      "id" (add1 $index)
      "type" "timeseries"
      "title" $panel.title
      "datasource" $source
      "gridPos" (dict "x" (mul 8 (mod $index 3)) "y" (mul 7 (div $index 3)) "w" 8 "h" 7)
      "fieldConfig" (dict "defaults" $defaults "overrides" list)
      "targets" $targets) }}
{{- end }}
{{- $variables := list
      (dict "type" "datasource" "name" "source" "query" "prometheus" "label" "Prometheus")
      (include "orca.variable" (list "namespace" "namespace" "orca_pool_up") | fromJson)
      (include "orca.variable" (list "deployment" "orca_deployment" `orca_pool_up{namespace=~"$namespace"}`) | fromJson) }}
{{- dict
      "uid" "orca-serving"
      "title" "Orca"
      "tags" (list "orca")
      "schemaVersion" 39
      "refresh" "30s"
      "time" (dict "from" "now-1h" "to" "now")
      "templating" (dict "list" $variables)
      "panels" $panels | toPrettyJson }}
{{- end }}

{{/* A variable of the dashboard as JSON: (list name label metric) offers the label's values on the metric. */}}
{{- define "orca.variable" -}}
{{- $query := printf "label_values(%s, %s)" (index . 2) (index . 1) }}
{{- dict
      "type" "query"
      "name" (index . 0)
      "label" (title (index . 0))
      "datasource" (dict "type" "prometheus" "uid" "${source}")
      "query" (dict "query" $query "refId" "A")
      "definition" $query
      "refresh" 2
      "multi" true
      "includeAll" true
      "allValue" ".*"
      "current" (dict "text" (list "All") "value" (list "$__all")) | toJson }}
{{- end }}
