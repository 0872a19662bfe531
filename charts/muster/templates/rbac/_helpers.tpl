{{/* Accounts and what they may do. The rules are those of muster.job.pytorchjob; a test compares them. */}}

{{- define "muster.rbac.launcherRules" -}}
- apiGroups: [kubeflow.org]
  resources: [pytorchjobs]
  verbs: [create, get, list, watch, update, delete]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create, get, update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list]
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  verbs: [list]
- apiGroups: [argoproj.io]
  resources: [workflows]
  verbs: [get]
{{- end -}}

{{- define "muster.rbac.jobRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get]
{{- end -}}
