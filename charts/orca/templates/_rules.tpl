{{/*
The rights of the operator. It uses every verb: it lists and watches to observe, creates and patches by server-side apply,
and deletes objects that are no longer wanted.
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
  resources: [serviceaccounts]
  verbs: [get, list, create, patch]
- apiGroups: [""]
  # Patched for each check of a plan; deleted are profiles and plans that another one has replaced.
  resources: [configmaps]
  verbs: [get, list, create, patch, delete]
- apiGroups: [""]
  # Created if there is none; patched for renewed certificates, and for rights in Redis that a release adds.
  resources: [secrets]
  verbs: [get, list, create, patch]
- apiGroups: [""]
  # Patched with an annotation, so that a kubelet brings a changed ConfigMap at once; deleted on lost nodes.
  resources: [pods]
  verbs: [list, watch, patch, delete]
- apiGroups: [""]
  # Listed to report why pods are refused or wait; created to report changes of a resource.
  resources: [events]
  verbs: [list, create]
- apiGroups: [apps]
  # Of gateways. It is not deleted: even without pods it tells which models the gateways had.
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
- apiGroups: [gateway.networking.k8s.io]
  # Those to which routes attach: are they programmed, and with TLS?
  resources: [gateways]
  verbs: [get]
{{- end }}

{{/* Rights to cluster-wide objects. An operator of single namespaces does not have them. */}}
{{- define "orca.clusterRules" -}}
- apiGroups: [""]
  # Lost nodes, whose pods have to be replaced.
  resources: [nodes]
  verbs: [list]
- apiGroups: [coordination.k8s.io]
  # That of another operator, which may be gone: are the resources that it served free?
  resources: [leases]
  verbs: [get]
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  verbs: [list, watch]
{{- end }}
