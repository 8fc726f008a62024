{{/*
What the operator may do, each verb because it uses it. It lists and watches to see what is, creates and patches by
server-side apply, and deletes what is no longer wanted.
*/}}
{{- define "orca.rules" -}}
- apiGroups: [orca-serving.io]
  resources: [orcadeployments]
  verbs: [get, list, watch]
- apiGroups: [orca-serving.io]
  resources: [orcadeployments/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [services, persistentvolumeclaims]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [configmaps, serviceaccounts]
  verbs: [get, list, create, patch]
- apiGroups: [""]
  # Created where there is none; patched for renewed certificates, and for rights in Redis that a release adds.
  resources: [secrets]
  verbs: [get, list, create, patch]
- apiGroups: [""]
  # Patched by an annotation, so that a changed ConfigMap comes at once; deleted on lost nodes.
  resources: [pods]
  verbs: [list, watch, patch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
- apiGroups: [apps]
  # Of gateways: without pods it still tells which models they were given.
  resources: [deployments]
  verbs: [get, list, watch, create, patch]
- apiGroups: [apps]
  resources: [statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch]
- apiGroups: [networking.k8s.io]
  resources: [ingresses]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, create, patch, delete]
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, list, create, patch, delete]
{{- end }}

{{/* What exists only for the whole cluster: the operator of single namespaces does without. */}}
{{- define "orca.clusterRules" -}}
- apiGroups: [""]
  # Lost nodes, whose pods have to be replaced.
  resources: [nodes]
  verbs: [list]
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  verbs: [list, watch]
{{- end }}
