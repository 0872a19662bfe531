{{/* Names, labels, images and security contexts that all roles share. */}}

{{- define "muster.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "muster.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "muster.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "muster.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What never changes in the life of an object. Takes (list $ role). */}}
{{- define "muster.selectorLabels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "muster.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "muster.labels" -}}
{{- $root := index . 0 -}}
{{ include "muster.selectorLabels" . }}
app.kubernetes.io/part-of: muster
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Takes (list $ name-of-image). */}}
{{- define "muster.image" -}}
{{- $root := index . 0 -}}
{{- $image := get $root.Values.images (index . 1) -}}
{{- $registry := $root.Values.images.registry -}}
{{- if and (hasKey $image "registry") (not (kindIs "invalid" $image.registry)) -}}
{{- $registry = $image.registry -}}
{{- end -}}
{{- $path := $image.repository -}}
{{- if $registry -}}
{{- $path = printf "%s/%s" (trimSuffix "/" $registry) $path -}}
{{- end -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $path $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $path (toString $image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "muster.pullSecrets" -}}
{{- with .Values.images.pullSecrets -}}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end -}}
{{- end -}}

{{- define "muster.podSecurityContext" -}}
fsGroup: {{ .Values.fleet.userId }}
fsGroupChangePolicy: OnRootMismatch
runAsGroup: {{ .Values.fleet.userId }}
runAsNonRoot: true
runAsUser: {{ .Values.fleet.userId }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "muster.containerSecurityContext" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
privileged: false
readOnlyRootFilesystem: true
runAsNonRoot: true
runAsUser: {{ .Values.fleet.userId }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}
